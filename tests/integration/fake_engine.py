"""An engine service that costs nothing: the contract of `EngineServiceProtocol`, and a process that can be killed.

What it writes depends on the request and the place in the text only, so every byte of an answer is known beforehand.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import zlib

from vtoken.core.errors import EngineLost
from vtoken.core.history import Entry, Event, History, to_mapping
from vtoken.core.replies import replica_lost
from vtoken.core.telemetry import Snapshot
from vtoken.core.transcript import DONE, Progress, Resume

STEP_S = 0.01
"""Of one token."""

BLOCKS_EACH = 4
"""That a running request holds."""

POISON = "poison"
"""A message that ends the replica's process after `max_tokens` tokens."""


def token(body, place):
    """The token id at a place of the answer."""
    return zlib.crc32(f"{body['messages'][-1]['content']} {place}".encode()) % 50_000


def text_of(body):
    """The whole answer."""
    return "".join(f"{place}:{token(body, place)} " for place in range(body["max_tokens"]))


class FakeEngine:
    def __init__(self, served_name):
        self._name, self._running, self._steps = served_name, 0, 0
        self._history = History()
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    @classmethod
    async def start(cls, _model, served_name, _config, _engine_kwargs):
        return cls(served_name)

    async def chat(self, body, progress=None):
        progress = progress or Progress(Resume(os.urandom(16).hex()))
        if body.get("seed") is not None:
            progress.obstacle = "seed"
        request_id = f"chatcmpl-{progress.resume.request_id}"
        self._history.record(f"{request_id}-00000000", Entry(1, Event.BEGIN))
        if body.get("stream"):
            return self._stream(body, request_id, progress)
        async with contextlib.aclosing(self._generate(body, progress)) as tokens:
            try:
                async for _ in tokens:
                    pass
            except RuntimeError:
                return replica_lost()
        served = {"engine_pid": self._process.pid, "served_by": os.getpid(), "began_at": progress.resume.groups.tokens}
        choice = {"message": {"content": text_of(body)}, "finish_reason": "length"}
        return {"id": request_id, "object": "chat.completion", "choices": [choice], **served}

    completion = chat

    def look(self, progress):
        """Nothing: every token is noted at once."""

    async def _generate(self, body, progress):
        """Groups of (place, token): first the known ones, then new ones of up to three tokens."""
        self._running += 1
        place = 0
        try:
            for group in progress.resume.groups:
                yield list(enumerate(group, place))
                place += len(group)
            while place < body["max_tokens"]:
                await self.check_health()
                size = min(1 + place % 3, body["max_tokens"] - place)
                await asyncio.sleep(STEP_S * size)
                group = [(at, token(body, at)) for at in range(place, place + size)]
                place += size
                self._steps += 1
                if progress.obstacle is None:
                    progress.add([one for _, one in group], ("length", None) if place == body["max_tokens"] else None)
                yield group
            if body["messages"][-1]["content"] == POISON:
                os.kill(os.getpid(), 9)
        finally:
            self._running -= 1

    async def _stream(self, body, request_id, progress):
        head = {"id": request_id, "object": "chat.completion.chunk", "created": time.time_ns()}

        def event(delta, finish=None):
            choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
            return f"data: {json.dumps({**head, 'choices': choices}, separators=(',', ':'))}\n\n"

        yield event({"role": "assistant", "content": ""})
        async with contextlib.aclosing(self._generate(body, progress)) as groups:
            try:
                async for group in groups:
                    last = group[-1][0] == body["max_tokens"] - 1
                    text = "".join(f"{place}:{one} " for place, one in group)
                    yield event({"content": text}, "length" if last else None)
            except RuntimeError as error:
                raise EngineLost from error
        yield DONE

    async def models(self):
        return {"object": "list", "data": [{"id": self._name}]}

    async def explain(self, request_id):
        await self.check_health()
        return {name: list(map(to_mapping, entries)) for name, entries in self._history.matching(request_id)}

    def snapshot(self):
        used = BLOCKS_EACH * self._running
        return Snapshot(
            block_size_tokens=16, capacity_blocks=1000, free_blocks=1000 - used, private_blocks=used,
            running_requests=self._running, steps_total=self._steps,
        )  # fmt: skip

    def details(self):
        return {}

    async def check_health(self):
        if self._process.poll() is not None:
            raise RuntimeError("the engine process has ended")

    async def shutdown(self):
        self._process.kill()
        self._process.wait()
