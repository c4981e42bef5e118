"""Requests of a drill, and recordings of every byte that came back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from vtoken.serving.status import client_of

CHAT = "/v1/chat/completions"
TIMEOUT_S = 180.0

TOPICS = (
    "the sea", "a lighthouse", "bread", "the moon", "an old bridge", "rain", "a violin", "winter", "bees", "a map",
    "a harbour", "clocks", "salt", "a forest", "glass", "a river", "chess", "lemons", "a desert", "books",
)  # fmt: skip


def chat_body(model: str, index: int, tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy chat request about topic `index` that generates exactly `tokens` tokens."""
    question = f"Tell me a long story about {TOPICS[index % len(TOPICS)]}, part {index // len(TOPICS) + 1}."
    messages = [{"role": "user", "content": question}]
    fixed = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {"model": model, "messages": messages, **fixed, **more}


@dataclass(slots=True)
class Recording:
    """What one client saw.

    Attributes:
        body: the request.
        status: of the response; 0 if there was none.
        raw: the bytes of the response's body, as far as they came.
        error: why it broke off, or "".
        seconds: from the request to the end.
    """

    body: Mapping[str, Any]
    status: int = 0
    raw: bytearray = field(default_factory=bytearray)
    error: str = ""
    seconds: float = 0.0

    @property
    def events(self) -> list[Any]:
        """The data of the server-sent events, decoded; "[DONE]" as it is."""
        lines = bytes(self.raw).decode("utf-8", "replace").split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [line if line == "[DONE]" else _decoded(line) for line in data]

    @property
    def pieces(self) -> int:
        """Server-sent events so far; cheap."""
        return self.raw.count(b"\n\n")

    @property
    def token_ids(self) -> list[int]:
        """Of a stream with `return_token_ids`: what was generated."""
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", [])]
        return [token for choice in choices for token in choice.get("token_ids") or ()]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events with content: objects without an error."""
        return [event for event in self.events if isinstance(event, dict) and "error" not in event]

    @property
    def answer(self) -> dict[str, Any]:
        """The object of a unary answer, or an empty one."""
        decoded = _decoded(bytes(self.raw).decode("utf-8", "replace"))
        return decoded if isinstance(decoded, dict) else {}

    @property
    def text(self) -> str:
        """What the model wrote, of the first choice."""
        if self.body.get("stream"):
            choices = [chunk["choices"][0] for chunk in self.chunks if chunk.get("choices")]
            return "".join(choice["delta"].get("content") or "" for choice in choices)
        choices = self.answer.get("choices") or [{"message": {}}]
        return choices[0]["message"].get("content") or ""

    @property
    def failure(self) -> str:
        """Why this is not a whole, good answer; "" if it is."""
        if self.error or self.status != 200:
            return self.error or f"status {self.status}: {bytes(self.raw[:300]).decode('utf-8', 'replace')}"
        if not self.body.get("stream"):
            return "" if self.answer.get("choices") else "no choices in the answer"
        wrong = [event for event in self.events if isinstance(event, dict) and "error" in event]
        if wrong:
            return f"error event: {wrong[0]['error']}"
        if not self.events or self.events[-1] != "[DONE]":
            return "truncated: no [DONE]"
        reasons = [choice.get("finish_reason") for chunk in self.chunks for choice in chunk.get("choices", [])]
        return "" if any(reasons) else "truncated: no finish_reason"


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def send(
    url: str,
    body: Mapping[str, Any],
    leave: Callable[[Recording], bool] = lambda _recording: False,
    recording: Recording | None = None,
) -> Recording:
    """Send a chat request, unary or streaming, and record the answer; never raises.

    Args:
        url: of the fleet.
        body: the request.
        leave: asked after every piece of the answer; the client goes when it says True.
        recording: where to record; a new one without it.
    """
    recording, start_s = recording or Recording(body), time.monotonic()
    try:
        with client_of(url, TIMEOUT_S) as client, client.stream("POST", CHAT, json=dict(body)) as response:
            recording.status = response.status_code
            for piece in response.iter_raw():
                recording.raw += piece
                if leave(recording):
                    break
    except httpx.HTTPError as error:
        recording.error = f"{type(error).__name__}: {error}"
    recording.seconds = time.monotonic() - start_s
    return recording


class Traffic:
    """Owner of client threads and their recordings.

    Args:
        url: of the fleet.

    Attributes:
        recordings: of all requests so far, those under way included.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self.recordings: list[Recording] = []

    def start(self, body: Mapping[str, Any]) -> Recording:
        """One request, in a thread of its own; its recording grows while the answer comes."""
        recording = self._new(body)
        self._begin(lambda: send(self._url, body, recording=recording))
        return recording

    def loop(self, bodies: Callable[[int], Mapping[str, Any]]) -> None:
        """One client that sends `bodies(0)`, `bodies(1)`, ... one after another until `stop`."""

        def run() -> None:
            turn = 0
            while not self._stop.is_set():
                body = bodies(turn)
                send(self._url, body, recording=self._new(body))
                turn += 1

        self._begin(run, "loop")

    def join(self) -> None:
        """Wait for every request that was started; not for loops."""
        for thread in self._threads:
            if not thread.name.startswith("loop"):
                thread.join()

    def stop(self) -> None:
        """Loops end after the request that they are at; waits for every client."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _new(self, body: Mapping[str, Any]) -> Recording:
        recording = Recording(body)
        self.recordings.append(recording)
        return recording

    def _begin(self, run: Callable[[], object], name: str = "client") -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
