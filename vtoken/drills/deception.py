"""What drills of telemetry share: one load under one fault, by effective room and by power of two in turn.

Goodput is the tokens that reach clients in a slice of time. The load never stops and the mode changes under it, so that
the two slices of a pair follow each other and a machine that grows slower meets both; the order turns from pair to
pair. A slice begins once most requests of the one before have ended. A fault ends under load, and the clock of the
recovery is the replica's own sequence of heartbeats: how many of them it takes until the router believes it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vtoken.core.trust import FLOOR
from vtoken.drills.traffic import Recording, Traffic, chat_body
from vtoken.drills.world import DrillError, World
from vtoken.results.outcome import Outcome
from vtoken.results.ratio import ratio

SETTINGS: dict[str, Any] = {"allow_faults": True, "vtoken": {"policy": {"policy": "none"}}}
OWN_FLEET = True

ROOM, POWER_OF_TWO = "room", "power_of_two"
CLIENTS = 12
LENGTHS = (16, 16, 16, 96)
"""Tokens of the requests of each client in turn: the skew that a router has to see."""

SLICE_S, QUICK_SLICE_S = 12.0, 5.0
PAIRS, QUICK_PAIRS = 10, 1
WARM_S = 6.0
"""From a change of the mode to its slice: what a long request takes."""

LEAST_SHARE = 0.98
MOST_HEARTBEATS = 2
RECOVERY_TIMEOUT_S = 30.0

Begin = Callable[[World, str], object]
"""Begins a fault; told the mode in force."""

End = Callable[[World, str], Mapping[str, int]]
"""Ends a fault; how many heartbeats each replica that it disturbed had sent by then. Some of them may still be on their
way: of a report that lags, the controller has not heard yet."""


def run(drill: str, world: World, quick: bool, begin: Begin, end: End, recovered: Callable[[World], bool]) -> Outcome:
    """Pairs of slices under the fault, and a recovery from it.

    Args:
        drill: its name.
        world: a fleet of this process.
        quick: one short pair, from which no bar of goodput can be decided.
        begin: begins the fault; its time counts.
        end: ends it.
        recovered: whether the router decides by the reports of all again.
    """
    outcome = Outcome(f"drill-{drill}")
    pairs, seconds = (QUICK_PAIRS, QUICK_SLICE_S) if quick else (PAIRS, SLICE_S)
    rates: dict[str, list[float]] = {ROOM: [], POWER_OF_TWO: []}
    world.settle()
    with _load(world) as traffic:
        for number in range(pairs):
            for mode in sorted(rates, reverse=bool(number % 2)):
                rates[mode].append(_goodput(world, traffic, mode, seconds, begin, end))
                world.progress(f"pair {number + 1}, {mode}: {rates[mode][-1]:.1f} tokens/s")
    _judge_goodput(outcome, rates)
    _judge_recovery(outcome, world, begin, end, recovered)
    return outcome


def of_reports(fault: str, world: World, quick: bool) -> Outcome:
    """`run` with a fault of one replica's own reports, by its name."""
    from vtoken.serving.disturb import inject

    return run(
        fault,
        world,
        quick,
        begin=lambda here, _mode: inject(victim(here), fault),
        end=lambda here, _mode: {(name := victim(here)): inject(name, "none")},
        recovered=lambda here: trust(here) >= FLOOR,
    )


def _goodput(world: World, traffic: Traffic, mode: str, seconds: float, begin: Begin, end: End) -> float:
    """Tokens per second that reach clients while the fault lasts.

    Raises:
        DrillError: a request failed.
    """
    from vtoken.serving.disturb import tune

    tune(world.local.settings, {"mode": mode})
    time.sleep(WARM_S)
    before, start_s = pieces(traffic.recordings), time.monotonic()
    begin(world, mode)
    time.sleep(max(0.0, start_s + seconds - time.monotonic()))
    after, took_s = pieces(traffic.recordings), time.monotonic() - start_s
    end(world, mode)
    failures = [recording.failure for recording in traffic.recordings if recording.seconds and recording.failure]
    if failures:
        raise DrillError(f"{len(failures)} requests failed under the fault, by {mode}: {failures[0]}")
    return (after - before) / took_s


def _judge_goodput(outcome: Outcome, rates: dict[str, list[float]]) -> None:
    share = ratio(rates[ROOM], rates[POWER_OF_TWO])
    outcome.values["tokens_per_s"] = {mode: [round(rate, 1) for rate in found] for mode, found in rates.items()}
    outcome.values["median_share"] = round(share.median, 3)
    outcome.values["share_of_power_of_two"] = share.to_mapping()
    outcome.expect(share.median >= LEAST_SHARE, f"goodput {share} of power of two's, at least {LEAST_SHARE}")


def _judge_recovery(outcome: Outcome, world: World, begin: Begin, end: End, recovered: Callable[[World], bool]) -> None:
    from vtoken.serving.disturb import tune

    tune(world.local.settings, {})
    with _load(world):
        time.sleep(WARM_S)
        begin(world, ROOM)
        time.sleep(WARM_S)
        outcome.values["decisions_under_fault"] = decisions(world)
        sent = end(world, ROOM)
        before = {**heartbeats(world), **sent}
        took_s = world.wait(lambda: recovered(world), RECOVERY_TIMEOUT_S)
        after = heartbeats(world)
    # A replica that was not in the view has come into it with one heartbeat.
    beats = {name: number - before.get(name, number - 1) for name, number in after.items()}
    outcome.values["recovery_s"] = None if took_s is None else round(took_s, 2)
    outcome.values["recovery_heartbeats"] = beats
    if took_s is None:
        outcome.expect(holds=False, otherwise=f"not recovered after {RECOVERY_TIMEOUT_S:.0f} s")
        return
    # One more may be counted: it came between the router's last view and ours.
    most = MOST_HEARTBEATS + 1
    outcome.expect(max(beats.values()) <= most, f"recovery took {beats} heartbeats, at most {MOST_HEARTBEATS}")


@contextmanager
def _load(world: World) -> Iterator[Traffic]:
    """Clients in closed loops."""
    traffic = Traffic(world.url)

    def bodies(client: int) -> Callable[[int], dict[str, Any]]:
        def body(turn: int) -> dict[str, Any]:
            tokens = LENGTHS[(turn + client) % len(LENGTHS)]
            return chat_body(world.model, 100 * client + turn, tokens, stream=True)

        return body

    for client in range(CLIENTS):
        traffic.loop(bodies(client))
    try:
        yield traffic
    finally:
        traffic.stop()


def pieces(recordings: list[Recording]) -> int:
    """Events that have reached clients; one is a token."""
    return sum(recording.pieces for recording in list(recordings))


def victim(world: World) -> str:
    """The replica that is disturbed, always the same one."""
    return min(str(replica["replica_id"]) for replica in world.replicas())


def trust(world: World) -> float:
    """The router's trust in the victim."""
    return float(world.fleet()["router"].get("trust", {}).get(victim(world), 1.0))


def decisions(world: World) -> dict[str, int]:
    """Of the router so far, by reason."""
    return dict(world.fleet()["router"].get("decisions_total", {}))


def heartbeats(world: World) -> dict[str, int]:
    """Sequence number of each replica's last heartbeat."""
    return {replica["replica_id"]: replica["sequence"] for replica in world.replicas()}
