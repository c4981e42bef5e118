"""`vtoken bench pressure`: this fleet's ingress against four simple rules, on two real replicas short of memory.

Clients in closed loops send requests of very different sizes: most are small, a few hold a third of a replica's pool.
`room` is routing by effective room behind the gate, which holds requests until there is memory for them, as it is
deployed; `room_ungated` shows the routing alone, `power_of_two_gated` the gate alone. The simple rules have no gate.
One run per rule, in rounds that begin with another rule each time; the fleet changes its rule live. A request is
good if it came whole, its first token within TTFT_S and the others within TPOT_S each on average; goodput is good
requests per second. Preemptions are the engines' own count.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console

from vtoken.core.routing import Mode
from vtoken.results.outcome import Outcome

if TYPE_CHECKING:
    from vtoken.serving.local import LocalFleet

BASELINES = tuple(mode.value for mode in (Mode.ROUND_ROBIN, Mode.POWER_OF_TWO, Mode.LEAST_OUTSTANDING, Mode.LEAST_KV))
OURS = Mode.ROOM.value
RULES: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode, "hold_for_memory": False} for mode in BASELINES},
    "room_ungated": {"mode": OURS, "hold_for_memory": False},
    "power_of_two_gated": {"mode": Mode.POWER_OF_TWO.value},
    OURS: {"mode": OURS},
}
"""Settings of the routers and gates by rule."""

SIZES = ((20, 24), (20, 24), (40, 48), (20, 24), (500, 200))
"""Words of the prompt and tokens of the answer, of each client's requests in turn."""

CLIENTS, FEW_CLIENTS = 20, 3
RUN_S, QUICK_RUN_S = 45.0, 15.0
TURNS, QUICK_TURNS = 10, 5
"""Requests of each of the few clients: the same for both rules, so that their goodput can be compared to per cents."""

ROUNDS, QUICK_ROUNDS = 3, 1
WARM_S = 5.0
TTFT_S, TPOT_S, WAIT_S = 4.0, 0.25, 2.0
"""Service level; and the gate's `max_wait_s`, which must leave the engine its part of TTFT_S."""

GAIN_BAR, PREEMPTION_BAR, EASY_BAR = 1.1, 0.5, 0.98

BLOCKS = 160
"""Per replica: 2,560 tokens, three of the large requests."""


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


def run(model: str, console: Console, quick: bool = False) -> Outcome:
    """Start two replicas, run every rule under pressure and without, and compare."""
    from vtoken.serving.local import LocalFleet
    from vtoken.serving.settings import DeploymentSettings

    rounds, seconds, turns = (QUICK_ROUNDS, QUICK_RUN_S, QUICK_TURNS) if quick else (ROUNDS, RUN_S, TURNS)
    with LocalFleet(DeploymentSettings.from_args(_arguments(model)), port=0, progress=console.print) as fleet:
        tight = _rounds(fleet, console, tuple(RULES), rounds, lambda: _for_a_time(fleet.url, CLIENTS, seconds))
        age_s = _fleet(fleet)["router"]["telemetry_age_s"]
        easy = _rounds(fleet, console, ("power_of_two", OURS), rounds, lambda: _by_turns(fleet.url, FEW_CLIENTS, turns))
    outcome = judge(*({rule: _summed(one) for rule, one in found.items()} for found in (tight, easy)))
    outcome.samples = [
        {
            "clients": clients, "rule": rule, "round": number, "seconds": tally.seconds, "good": tally.good,
            "late": tally.late, "failed": tally.failed, "preemptions": preemptions,
        }
        for clients, found in ((CLIENTS, tight), (FEW_CLIENTS, easy))
        for rule, results in found.items()
        for number, (tally, preemptions) in enumerate(results)
    ]  # fmt: skip
    outcome.values["telemetry_age_s"] = {key: age_s[key] for key in ("count", "p50", "p99")}
    return outcome


def judge(tight: dict[str, dict[str, Any]], easy: dict[str, dict[str, Any]]) -> Outcome:
    """The bars, from the results by rule under pressure and without."""
    best = max(tight[rule]["good_per_s"] for rule in BASELINES)
    gain = tight[OURS]["good_per_s"] / best if best else float("inf")
    preemptions = tight[OURS]["preemptions"], tight["round_robin"]["preemptions"]
    beside = easy["power_of_two"]["good_per_s"]
    share = easy[OURS]["good_per_s"] / beside if beside else float("inf")
    passed = gain >= GAIN_BAR and preemptions[0] <= PREEMPTION_BAR * preemptions[1] and share >= EASY_BAR
    values = {
        "under_pressure": tight, "without_pressure": easy, "gain_over_best": round(gain, 3),
        "share_without_pressure": round(share, 3), "limits_s": {"ttft": TTFT_S, "tpot": TPOT_S},
    }  # fmt: skip
    return Outcome("pressure", passed, values)


def _arguments(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "served_model_name": "bench",
        "engine": {
            "dtype": "bfloat16", "max_model_len": 1024, "block_size": 16, "max_num_seqs": 16,
            "num_gpu_blocks_override": BLOCKS, "kv_cache_memory_bytes": 1 << 27, "enforce_eager": True,
            "enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 2048,
        },
        "vtoken": {"policy": {"policy": "none"}},
        "replicas": {
            "count": 2, "num_cpus": 1, "max_ongoing_requests": 16,
            "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        },
        "limits": {"max_queued_requests": 64, "max_wait_s": WAIT_S},
    }  # fmt: skip


def _rounds(
    fleet: LocalFleet, console: Console, rules: tuple[str, ...], rounds: int, load: Callable[[], Tally]
) -> dict[str, list[tuple[Tally, int]]]:
    """What the clients of each round saw, and its preemptions, by rule."""
    from vtoken.serving.disturb import tune

    found: dict[str, list[tuple[Tally, int]]] = {rule: [] for rule in rules}
    for number in range(rounds):
        for place in range(len(rules)):
            rule = rules[(place + number) % len(rules)]
            tune(fleet.settings, RULES[rule])
            before = _preemptions(fleet)
            tally = load()
            found[rule].append((tally, _preemptions(fleet) - before))
            console.print(f"{rule}, {tally.seconds:.0f} s: {tally.good} good, {tally.late} late, {tally.failed} failed")
    return found


def _summed(results: list[tuple[Tally, int]]) -> dict[str, Any]:
    ttft_s = sorted(time_s for tally, _ in results for time_s in tally.ttft_s)
    return {
        "good_per_s": round(sum(tally.good for tally, _ in results) / sum(tally.seconds for tally, _ in results), 3),
        "late": sum(tally.late for tally, _ in results), "failed": sum(tally.failed for tally, _ in results),
        "preemptions": sum(count for _, count in results),
        "ttft_p50_s": round(ttft_s[len(ttft_s) // 2], 3) if ttft_s else None,
    }  # fmt: skip


def _preemptions(fleet: LocalFleet) -> int:
    return sum(replica["preemptions_total"] for replica in _fleet(fleet)["replicas"])


def _fleet(fleet: LocalFleet) -> dict[str, Any]:
    """`/v1/vtoken/fleet`, however long the controller takes."""
    while (response := httpx.get(fleet.url + "/v1/vtoken/fleet", timeout=60.0)).status_code != 200:
        time.sleep(0.2)
    found: dict[str, Any] = response.json()
    return found


def _for_a_time(url: str, clients: int, seconds: float) -> Tally:
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


def _by_turns(url: str, clients: int, turns: int) -> Tally:
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
