"""Two concurrent clients of the official `openai` package against the local fleet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.live import Live

from vtoken.demo.prompts import conversation
from vtoken.serving.status import WIDE_AT, StatusError, fetch, render

CLIENTS = 2
STREAMS_PER_CLIENT = 4
REQUESTS = 16
TOKENS = 256
REQUEST_TIMEOUT_S = 180.0
REFRESH_S = 0.5
LOG_EVERY_S = 10.0

OPTIONS: tuple[dict[str, Any], ...] = (
    {"policy": "streaming_llm", "budget_tokens": 128, "protect_recent": 32},
    {"policy": "random", "budget_tokens": 128, "protect_recent": 32, "interval_tokens": 16},
)
"""Each client forgets by a policy of its own, through the request's `vtoken` object."""


@dataclass(slots=True)
class Tally:
    """What the clients saw. Written under `lock` only."""

    requests: int = 0
    errors: int = 0
    tokens: int = 0
    first_error: str = ""
    sample: str = ""


class Clients:
    """Owner of the clients, their threads and their tally: each client keeps STREAMS_PER_CLIENT requests open."""

    def __init__(self, url: str, model: str) -> None:
        self._clients = [
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)
            for _ in range(CLIENTS)
        ]
        self._model = model
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.tally = Tally()

    @contextmanager
    def running(self) -> Iterator[list[Future[None]]]:
        """The clients at work; leaving early stops them at their next chunk."""
        with ThreadPoolExecutor(CLIENTS * STREAMS_PER_CLIENT, "stream") as pool:
            try:
                yield [pool.submit(self._serve_one, index) for index in range(REQUESTS)]
            finally:
                self._stop.set()

    def _serve_one(self, index: int) -> None:
        if not self._stop.is_set():
            self._record(*self._ask(index))

    def _ask(self, index: int) -> tuple[str, int, str]:
        """One streamed chat request of client `index` modulo CLIENTS: (text, tokens, error or "")."""
        text, tokens = [], 0
        client, options = self._clients[index % CLIENTS], OPTIONS[index % CLIENTS]
        try:
            stream = client.chat.completions.create(
                model=self._model, messages=conversation(index), max_tokens=TOKENS, temperature=0.7, seed=index,
                stream=True, stream_options={"include_usage": True},
                extra_body={"ignore_eos": True, "vtoken": options},
            )  # type: ignore[call-overload]  # fmt: skip
            for chunk in stream:
                if self._stop.is_set():
                    break
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                text += [choice.delta.content or "" for choice in chunk.choices]
        except (openai.OpenAIError, httpx.HTTPError) as error:
            return "".join(text), tokens, f"{type(error).__name__}: {error}"
        short = "" if tokens == TOKENS else f"{tokens} of {TOKENS} tokens arrived"
        return "".join(text), tokens, short

    def _record(self, text: str, tokens: int, error: str) -> None:
        with self._lock:
            self.tally.requests += 1
            self.tally.tokens += tokens
            self.tally.sample = self.tally.sample or text
            if error:
                self.tally.errors += 1
                self.tally.first_error = self.tally.first_error or error


def serve(url: str, model: str, console: Console) -> tuple[Tally, dict[str, Any]]:
    """Send all requests and show the fleet meanwhile; the tally and the fleet's last state."""
    clients = Clients(url, model)
    with httpx.Client(base_url=url, timeout=5.0) as http, clients.running() as futures:
        show(http, console, futures)
        for future in futures:
            future.result()
        time.sleep(1.5)  # one idle heartbeat, so that the last state includes the last request's end
        return clients.tally, fetch(http)


def show(http: httpx.Client, console: Console, futures: Sequence[Future[None]]) -> None:
    """The live table until all requests are done; where there is no terminal, a table every now and then."""
    wide, shown_s = console.width >= WIDE_AT, time.monotonic()
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        while not all(future.done() for future in futures):
            time.sleep(REFRESH_S)
            try:
                table = render(fetch(http), wide)
            except StatusError as error:
                console.log(str(error), markup=False)
                continue
            if console.is_terminal:
                live.update(table, refresh=True)
            elif time.monotonic() - shown_s >= LOG_EVERY_S:
                shown_s = time.monotonic()
                console.print(table)
