"""Child programs of the demo: they end with it, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from vtoken.core.errors import VTokenError
from vtoken.processes import Mark
from vtoken.signals import undisturbed

TAIL_CHARS = 3000


class ChildError(VTokenError):
    """A child program failed; the message ends with what it said."""


def run_json(arguments: list[str], mark: Mark, progress: Callable[[str], None], **environment: str) -> dict[str, Any]:
    """Run `python -m ARGUMENTS...`; its last line of output as JSON.

    Lines on its standard error go to `progress` if they are three words (a progress report) and are
    kept for the error message otherwise. The child and all that it started are gone afterwards.

    Raises:
        ChildError: it failed, or printed no JSON.
    """
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=output, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment, **mark.environment}, start_new_session=True,
        )  # fmt: skip
        said: list[str] = []
        try:
            assert child.stderr is not None
            for line in child.stderr:
                if len(line.split()) == 3 and line[0].isdigit():
                    progress(line.strip())
                else:
                    said.append(line)
            status = child.wait()
        finally:
            with undisturbed():
                mark.end_processes(signal_first=signal.SIGKILL if child.poll() is None else None)
                child.wait()
        output.seek(0)
        lines = output.read().strip().splitlines()
    if status or not lines:
        raise ChildError(f"{' '.join(arguments)} ended with status {status}:\n{''.join(said)[-TAIL_CHARS:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
