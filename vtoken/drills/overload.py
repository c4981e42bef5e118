"""Three times as many clients as fit: who is refused is told when to come and let in then; nothing hangs or grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from vtoken.drills.traffic import CHAT, chat_body
from vtoken.drills.world import World
from vtoken.results.outcome import Outcome

SETTINGS: Mapping[str, Any] = {
    "replicas": {"max_ongoing_requests": 4},
    "limits": {"max_queued_requests": 8},
}

CLIENTS_PER_PLACE = 3
TOKENS = 32
SECONDS, QUICK_SECONDS = 120.0, 20.0
ANSWER_S = 60.0
"""Longest wait for an answer of any kind; longer is a hang."""

FIRST_RETRIES = 0.9
"""Least share of the first retries that are let in."""

GROWTH = 1.05
"""Most growth of the fleet's memory from the drill's second quarter to its last."""

LOOK_S = 0.25


@dataclass(slots=True)
class Tally:
    """What all clients saw together.

    Attributes:
        answered: requests that ended with 200.
        refused: 429s with Retry-After.
        first_retries, let_in: first retries of requests, and those that ended with 200.
        wrong: a sentence for each answer that is neither, at most a few.
        wrongs: how many there were.
        waits_s: what Retry-After said.
    """

    answered: int = 0
    refused: int = 0
    first_retries: int = 0
    let_in: int = 0
    wrongs: int = 0
    wrong: list[str] = field(default_factory=list)
    waits_s: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, status: int, attempt: int, retry_after: str | None, what: str) -> None:
        """One answer to the `attempt`-th attempt of a request (0: the first)."""
        with self.lock:
            self.first_retries += attempt == 1
            if status == 200:
                self.answered += 1
                self.let_in += attempt == 1
            elif status == 429 and retry_after is not None and retry_after.isdigit():
                self.refused += 1
                self.waits_s.append(int(retry_after))
            else:
                self.wrongs += 1
                self.wrong = [*self.wrong, what][:3]


def run(world: World, quick: bool) -> Outcome:
    """See the module."""
    return overload(world, QUICK_SECONDS if quick else SECONDS)


def overload(world: World, seconds: float, tokens: int = TOKENS) -> Outcome:
    """Overload a fleet for so long, with answers of so many tokens."""
    world.settle()
    gate = world.fleet()["admission"]
    clients, tally, outcome = CLIENTS_PER_PLACE * gate["places"], Tally(), Outcome("drill-overload")
    world.progress(f"{clients} clients at {gate['places']} places, a line of {gate['waiting_bound']}")
    end_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_client, args=(world, tally, index, end_s, tokens), daemon=True)
        for index in range(clients)
    ]
    for thread in threads:
        thread.start()
    longest, memory = _watch(world, end_s)
    for thread in threads:
        thread.join(timeout=4 * ANSWER_S)
    hung = sum(thread.is_alive() for thread in threads)
    share = tally.let_in / max(1, tally.first_retries)
    outcome.values.update({
        "clients": clients,
        "places": gate["places"],
        "answered": tally.answered,
        "refused": tally.refused,
        "first_retries": tally.first_retries,
        "let_in_at_first_retry": round(share, 4),
        "longest_line": longest,
        "line_bound": gate["waiting_bound"],
        "mean_retry_after_s": round(sum(tally.waits_s) / max(1, len(tally.waits_s)), 2),
        "other_answers": tally.wrongs,
        "hung": hung,
        "decisions": world.fleet()["admission"]["decisions_total"],
    })  # fmt: skip
    outcome.expect(tally.wrongs == 0, f"{tally.wrongs} answers are neither 200 nor 429 with a time: {tally.wrong}")
    outcome.expect(hung == 0, f"{hung} clients have no answer")
    outcome.expect(tally.refused > 0, "nobody was refused, so nothing was shown")
    outcome.expect(share >= FIRST_RETRIES, f"{share:.3f} of the first retries were let in, at least {FIRST_RETRIES}")
    outcome.expect(longest <= gate["waiting_bound"], f"{longest} waited, at most {gate['waiting_bound']} may")
    _judge_memory(outcome, memory)
    world.settle()
    return outcome


def _client(world: World, tally: Tally, index: int, end_s: float, tokens: int) -> None:
    """One request after another, every one tried again when the server says, until the time is over."""
    turn = 0
    with httpx.Client(base_url=world.url, timeout=ANSWER_S, headers=world.http.headers) as http:
        while time.monotonic() < end_s:
            _request(http, tally, chat_body(world.model, 1000 * turn + index, tokens))
            turn += 1


def _request(http: httpx.Client, tally: Tally, body: Mapping[str, Any]) -> None:
    attempt = 0
    while True:
        try:
            response = http.post(CHAT, json=dict(body))
        except httpx.HTTPError as error:
            tally.note(0, attempt, None, f"{type(error).__name__}: {error}")
            return
        after = response.headers.get("retry-after")
        tally.note(response.status_code, attempt, after, f"{response.status_code}: {response.text[:200]}")
        if response.status_code != 429 or after is None:
            return
        attempt += 1
        time.sleep(float(after))


def _watch(world: World, end_s: float) -> tuple[int, list[int]]:
    """The longest line seen, and the memory of the fleet's processes in bytes at every look (none if it is foreign)."""
    longest, memory = 0, []
    processes = world.own_processes()
    while time.monotonic() < end_s:
        longest = max(longest, world.fleet()["admission"]["waiting_requests"])
        if processes:
            memory.append(sum(_resident(process) for process in processes))
        time.sleep(LOOK_S)
    return longest, memory


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _judge_memory(outcome: Outcome, memory: list[int]) -> None:
    quarter = len(memory) // 4
    if not quarter:
        return
    before, after = sorted(memory[quarter : 2 * quarter])[quarter // 2], sorted(memory[-quarter:])[quarter // 2]
    outcome.values["memory_growth"] = round(after / before, 4)
    outcome.expect(after <= GROWTH * before, f"memory grew to {after / before:.3f} of what it was, at most {GROWTH}")
