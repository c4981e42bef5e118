"""An engine service that costs nothing: the contract of `EngineServiceProtocol`, and a process that can be killed."""

import asyncio
import os
import subprocess
import sys
import uuid

from vtoken.core.history import Entry, Event, History, to_mapping
from vtoken.core.telemetry import Snapshot

STEP_S = 0.01
"""Of one token."""


class FakeEngine:
    def __init__(self, served_name):
        self._name, self._running = served_name, 0
        self._history = History()
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    @classmethod
    async def start(cls, _model, served_name, _config, _engine_kwargs):
        return cls(served_name)

    async def chat(self, body):
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._history.record(f"{request_id}-{uuid.uuid4().hex[:8]}", Entry(1, Event.BEGIN))
        self._running += 1
        try:
            for _ in range(body["max_tokens"]):
                await self.check_health()
                await asyncio.sleep(STEP_S)
        finally:
            self._running -= 1
        served = {"engine_pid": self._process.pid, "served_by": os.getpid()}
        return {"id": request_id, "object": "chat.completion", **served}

    completion = chat

    async def models(self):
        return {"object": "list", "data": [{"id": self._name}]}

    async def explain(self, request_id):
        await self.check_health()
        return {name: list(map(to_mapping, entries)) for name, entries in self._history.matching(request_id)}

    def snapshot(self):
        return Snapshot(block_size_tokens=16, capacity_blocks=1000, free_blocks=1000, running_requests=self._running)

    async def check_health(self):
        if self._process.poll() is not None:
            raise RuntimeError("the engine process has ended")

    async def shutdown(self):
        self._process.kill()
        self._process.wait()
