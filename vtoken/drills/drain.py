"""A replica is taken away by plan under streams that take longer than it has, and comes back: nobody notices."""

from __future__ import annotations

from vtoken.drills.upheaval import EVERY_S, EXACT, begin_streams, failovers, judge_answers, recover, unary_loops
from vtoken.drills.world import DrillError, World
from vtoken.results.outcome import Outcome

SETTINGS = EXACT
OWN_FLEET = True

STREAMS, TOKENS, QUICK_TOKENS, BEGUN = 12, 600, 400, 5
LOOPS = 4


def run(world: World, quick: bool) -> Outcome:
    """Two replicas, one, two; every answer must be whole."""
    outcome = Outcome("drill-drain")
    with unary_loops(world, LOOPS) as loops:
        traffic, streams = begin_streams(world, STREAMS, QUICK_TOKENS if quick else TOKENS, BEGUN)
        before = set(world.local.replica_pids())
        world.local.scale(1)
        outcome.values["gone_after_s"] = round(_until_gone(world, before), 1)
        traffic.join()
        world.local.scale(2)
        outcome.values["back_after_s"] = round(recover(world, set()), 1)
    outcome.values["failovers"] = failovers(world)
    judge_answers(outcome, "stream", streams)
    judge_answers(outcome, "unary", loops.recordings)
    return outcome


def _until_gone(world: World, before: set[str]) -> float:
    world.progress("one replica is to end")
    took_s = world.wait(lambda: len({one["replica_id"] for one in world.replicas()} & before) == 1, 180.0, EVERY_S)
    if took_s is None:
        raise DrillError(f"both replicas are still there: {world.replicas()}")
    world.progress(f"it has ended; {failovers(world)}")
    return took_s
