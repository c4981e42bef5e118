"""Streams and unary loops while replicas come and go: what the drills of failover share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vtoken.drills.traffic import Recording, Traffic, chat_body
from vtoken.drills.world import DrillError, World
from vtoken.results.outcome import Outcome

LOOPS = 8
LOOP_TOKENS = 16
UNARY_BODIES = 4
"""Each loop sends so many different requests in turn, so that their answers can be compared."""

START_TIMEOUT_S, RECOVERY_S = 300.0, 600.0
EVERY_S = 0.25
"""Between two looks: each asks the fleet and Serve, on the cores that the engines need."""

EXACT: Mapping[str, Any] = {
    "engine": {
        "dtype": "float32",
        "max_num_seqs": 32,
        "num_gpu_blocks_override": 640,
        "kv_cache_memory_bytes": 1 << 29,
    },
    "vtoken": {"policy": {"policy": "none"}},
    "replicas": {
        "count": 2,
        "num_cpus": 1,
        "max_ongoing_requests": 40,
        "health_check_period_s": 1,
        "graceful_shutdown_timeout_s": 20,
    },
}
"""Settings under which a text does not depend on its neighbours, and nothing is forgotten."""


def stream_body(world: World, index: int, tokens: int) -> dict[str, Any]:
    """A greedy stream that says which tokens it is made of."""
    return chat_body(world.model, index, tokens, stream=True, return_token_ids=True)


def loop_body(world: World, loop: int, turn: int) -> dict[str, Any]:
    """The request of a unary loop at its n-th turn."""
    return chat_body(world.model, 1000 + UNARY_BODIES * loop + turn % UNARY_BODIES, LOOP_TOKENS)


@contextmanager
def unary_loops(world: World, loops: int = LOOPS) -> Iterator[Traffic]:
    """Loops of unary requests around a drill's disturbances."""
    traffic = Traffic(world.url)

    def bodies(loop: int) -> Callable[[int], dict[str, Any]]:
        return lambda turn: loop_body(world, loop, turn)

    for loop in range(loops):
        traffic.loop(bodies(loop))
    try:
        yield traffic
    finally:
        traffic.stop()


def begin_streams(world: World, count: int, tokens: int, begun: int) -> tuple[Traffic, list[Recording]]:
    """So many streams, each of which has sent `begun` events.

    Raises:
        DrillError: they have not after START_TIMEOUT_S.
    """
    traffic = Traffic(world.url)
    recordings = [traffic.start(stream_body(world, index, tokens)) for index in range(count)]

    def all_begun() -> bool:
        return all(recording.pieces >= begun or recording.seconds for recording in recordings)

    if world.wait(all_begun, START_TIMEOUT_S, EVERY_S) is None:
        raise DrillError(f"{count} streams have not begun after {START_TIMEOUT_S:.0f} s")
    return traffic, recordings


def recover(world: World, before: set[str], wanted: int = 2) -> float:
    """Seconds until so many replicas serve, and none of those `before`.

    Raises:
        DrillError: it takes longer than RECOVERY_S.
    """

    def recovered() -> bool:
        alive = {r["replica_id"] for r in world.replicas() if not r["draining"] and r["age_s"] < 2.0}
        return len(alive) == wanted == len(world.local.replica_pids()) and not alive & before

    took_s = world.wait(recovered, RECOVERY_S, EVERY_S)
    if took_s is None:
        raise DrillError(f"not {wanted} replicas after {RECOVERY_S:.0f} s: {world.local.replica_pids()}")
    return took_s


def judge_answers(outcome: Outcome, kind: str, recordings: list[Recording]) -> None:
    """Every answer must be whole: none lost, none truncated, no status but 200."""
    failures = [recording.failure for recording in recordings if recording.failure]
    outcome.values[f"{kind}_requests"] = len(recordings)
    outcome.values[f"{kind}_lost"] = sum(not failure.startswith(("status 5", "truncated")) for failure in failures)
    outcome.values[f"{kind}_truncated"] = sum(failure.startswith("truncated") for failure in failures)
    outcome.values[f"{kind}_bare_500"] = sum(failure.startswith("status 5") for failure in failures)
    outcome.expect(not failures, f"{len(failures)} of {len(recordings)} {kind} requests failed: {failures[:2]}")


def failovers(world: World) -> dict[str, int]:
    """Failovers of the ingress so far, by outcome."""
    counts: dict[str, int] = world.fleet()["failovers_total"]
    return counts
