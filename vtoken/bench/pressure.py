"""`vtoken bench pressure`: this fleet's ingress against four simple rules, on two real replicas short of memory.

Clients in closed loops send requests of very different sizes: most are small, a few hold a third of a replica's pool.
`room` is routing by effective room behind the gate, which holds requests until there is memory for them, as it is
deployed; `room_ungated` shows the routing alone, `power_of_two_gated` the gate alone. The simple rules have no gate.
One run per rule, in rounds that begin with another rule each time; the fleet changes its rule live. A request is
good if it came whole, its first token within TTFT_S and the others within TPOT_S each on average; goodput is good
requests per second. Preemptions are the engines' own count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console

from vtoken.bench.pressure_clients import TPOT_S, TTFT_S, WAIT_S, Tally, by_turns, for_a_time
from vtoken.core.routing import Mode
from vtoken.results.outcome import Outcome
from vtoken.results.ratio import Ratio, ratio

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

CLIENTS, FEW_CLIENTS = 20, 3
RUN_S, QUICK_RUN_S = 45.0, 15.0
TURNS = 5
"""Requests of each of the few clients: the same for both rules, so that their goodput can be compared to per cents."""

ROUNDS, EASY_ROUNDS, QUICK_ROUNDS = 3, 6, 1
GAIN_BAR, PREEMPTION_BAR, EASY_BAR = 1.1, 0.5, 0.98
AGE_BAR_S = 0.2
"""Of what a router knows of a busy replica at a decision, 99th percentile."""

SETTLED_S = 1.5
"""After a change of rules: idle routers and gates ask twice a second, and the last round's requests are leaving."""

BLOCKS = 160
"""Per replica: 2,560 tokens, three of the large requests."""


def run(model: str, console: Console, quick: bool = False) -> Outcome:
    """Start two replicas, run every rule under pressure and without, and compare."""
    from vtoken.serving.local import LocalFleet
    from vtoken.serving.settings import DeploymentSettings

    rounds, easy_rounds, seconds = (QUICK_ROUNDS, QUICK_ROUNDS, QUICK_RUN_S) if quick else (ROUNDS, EASY_ROUNDS, RUN_S)
    with LocalFleet(DeploymentSettings.from_args(_arguments(model)), port=0, progress=console.print) as fleet:
        tight = _rounds(fleet, console, tuple(RULES), rounds, lambda: for_a_time(fleet.url, CLIENTS, seconds))
        age_s = _fleet(fleet)["router"]["telemetry_age_s"]
        easy = _rounds(
            fleet, console, ("power_of_two", OURS), easy_rounds, lambda: by_turns(fleet.url, FEW_CLIENTS, TURNS)
        )
    share = ratio(*([tally.good / tally.seconds for tally, _ in easy[rule]] for rule in (OURS, "power_of_two")))
    summed = [{rule: _summed(one) for rule, one in found.items()} for found in (tight, easy)]
    outcome = judge(summed[0], summed[1], share, {key: age_s[key] for key in ("count", "p50", "p99")})
    outcome.samples = [
        {
            "clients": clients, "rule": rule, "round": number, "seconds": tally.seconds, "good": tally.good,
            "late": tally.late, "failed": tally.failed, "preemptions": preemptions,
        }
        for clients, found in ((CLIENTS, tight), (FEW_CLIENTS, easy))
        for rule, results in found.items()
        for number, (tally, preemptions) in enumerate(results)
    ]  # fmt: skip
    return outcome


def judge(
    tight: dict[str, dict[str, Any]], easy: dict[str, dict[str, Any]], share: Ratio, age_s: dict[str, Any]
) -> Outcome:
    """The bars, from the results by rule under pressure and without.

    Args:
        tight: by rule, see `_summed`.
        easy: likewise.
        share: of our goodput and that of power of two, without pressure.
        age_s: of what a router knew at its decisions: count, p50, p99.
    """
    best = max(tight[rule]["good_per_s"] for rule in BASELINES)
    gain = tight[OURS]["good_per_s"] / best if best else float("inf")
    ours, theirs = tight[OURS]["preemptions"], tight["round_robin"]["preemptions"]
    values = {
        "under_pressure": tight, "without_pressure": easy, "gain_over_best": round(gain, 3),
        "share_without_pressure": round(share.median, 3), "share_of_power_of_two": share.to_mapping(),
        "limits_s": {"ttft": TTFT_S, "tpot": TPOT_S}, "telemetry_age_s": age_s,
    }  # fmt: skip
    outcome = Outcome("pressure", values=values)
    outcome.expect(gain >= GAIN_BAR, f"goodput {gain:.3f} x the best simple rule's, at least {GAIN_BAR}")
    outcome.expect(ours <= PREEMPTION_BAR * theirs, f"{ours} preemptions beside {theirs} of round robin, at most half")
    outcome.expect(share.median >= EASY_BAR, f"{share} of power of two without pressure, at least {EASY_BAR}")
    known = age_s["p99"] is not None and age_s["p99"] <= AGE_BAR_S
    outcome.expect(known, f"telemetry up to {age_s['p99']} s old at decisions (99th percentile), at most {AGE_BAR_S}")
    return outcome


def _arguments(model: str) -> dict[str, Any]:
    from vtoken.serving.local import ONE_CORE

    return {
        "model": model,
        "served_model_name": "bench",
        "engine": {
            "distributed_executor_backend": "uni", "dtype": "bfloat16", "max_model_len": 1024, "block_size": 16,
            "max_num_seqs": 16, "num_gpu_blocks_override": BLOCKS, "kv_cache_memory_bytes": 1 << 27,
            "enforce_eager": True, "enable_prefix_caching": False, "enable_chunked_prefill": False,
            "max_num_batched_tokens": 2048,
        },
        "vtoken": {"policy": {"policy": "none"}},
        "replicas": {
            "count": 2, "num_cpus": 1, "max_ongoing_requests": 16,
            "env": ONE_CORE,
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
            time.sleep(SETTLED_S)
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
