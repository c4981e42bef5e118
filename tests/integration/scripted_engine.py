"""An engine whose snapshot is a function of what a file says: the test knows every number at every step."""

import asyncio
import json
import os
from pathlib import Path

from fake_engine import FakeEngine
from script import SCRIPT, scripted, scripted_details


class ScriptedEngine(FakeEngine):
    def _script(self):
        return json.loads(Path(os.environ[SCRIPT]).read_text())

    def snapshot(self):
        return scripted(**self._script())

    def details(self):
        return scripted_details(**self._script())

    async def check_health(self):
        while self._script()["frozen"] == os.getpid():
            await asyncio.sleep(0.05)
        await super().check_health()
