"""The clients of `vtoken bench pressure`: closed loops of requests of very different sizes, and what they saw."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import httpx

SIZES = ((20, 24), (20, 24), (40, 48), (20, 24), (500, 200))
"""Words of the prompt and tokens of the answer, of each client's requests in turn."""

TTFT_S, TPOT_S, WAIT_S = 4.0, 0.25, 2.0
"""Service level; and the gate's `max_wait_s`, which must leave the engine its part of TTFT_S."""

WARM_S = 5.0


@dataclass(slots=True)
class Tally:
    """What the clients of one run saw."""

    seconds: float = 0.0
    good: int = 0
    late: int = 0
    failed: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def note(self, status: int, whole: bool, times_s: list[float], start_s: float) -> None:
        """One request, with the moments of its tokens."""
        if status != 200 or not whole:
            self.failed += 1
            return
        ttft_s = times_s[0] - start_s
        tpot_s = (times_s[-1] - times_s[0]) / max(1, len(times_s) - 1)
        self.ttft_s.append(ttft_s)
        if ttft_s <= TTFT_S and tpot_s <= TPOT_S:
            self.good += 1
        else:
            self.late += 1


def for_a_time(url: str, clients: int, seconds: float) -> Tally:
    """Closed loops for WARM_S and then `seconds`; only requests that end in the latter count."""
    tally, lock, ended = Tally(seconds), threading.Lock(), threading.Event()
    count_from_s = time.monotonic() + WARM_S

    def client(number: int) -> None:
        turn = number
        with httpx.Client(base_url=url, timeout=120.0) as http:
            while not ended.is_set():
                seen = _ask(http, number, turn, ended.is_set)
                turn += 1
                if time.monotonic() >= count_from_s and not ended.is_set():
                    with lock:
                        tally.note(*seen)

    threads = _started(client, clients)
    time.sleep(WARM_S + seconds)
    ended.set()
    for thread in threads:
        thread.join()
    return tally


def by_turns(url: str, clients: int, turns: int) -> Tally:
    """Closed loops of `turns` requests each; all count, and the time until the last one ends."""
    tally, lock, began_s = Tally(), threading.Lock(), time.monotonic()

    def client(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120.0) as http:
            for turn in range(number, number + turns):
                seen = _ask(http, number, turn, lambda: False)
                with lock:
                    tally.note(*seen)

    for thread in _started(client, clients):
        thread.join()
    tally.seconds = time.monotonic() - began_s
    return tally


def _started(client: Callable[[int], None], count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def _ask(http: httpx.Client, number: int, turn: int, leave: Callable[[], bool]) -> tuple[int, bool, list[float], float]:
    """Status, whether the stream came to its end, the moments of its tokens, and that of its start."""
    words, tokens = SIZES[turn % len(SIZES)]
    prompt = f"{number} {turn} " + "sea " * words
    start_s, times_s, whole = time.monotonic(), list[float](), False
    body = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    try:
        with http.stream("POST", "/v1/completions", json=body) as response:
            for event in events(response.iter_bytes()):
                if event == b"data: [DONE]":
                    whole = bool(times_s)
                elif event.startswith(b"data: ") and json.loads(event[6:]).get("choices"):
                    times_s.append(time.monotonic())
                if leave():
                    break
            if response.status_code == 429:
                time.sleep(min(2.0, float(response.headers.get("retry-after", 1))))
            return response.status_code, whole, times_s, start_s
    except httpx.HTTPError:
        return 0, False, times_s, start_s


def events(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Server-sent events of a stream, whole. Only blank lines end one: a text may hold what Unicode calls a line's end,
    and httpx's own `iter_lines` would cut there.
    """
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        yield from whole
