"""Every process of the fleet is replaced under load, as after a change of settings: nobody notices."""

from __future__ import annotations

from vtoken.drills.upheaval import EXACT, begin_streams, failovers, judge_answers, recover, unary_loops
from vtoken.drills.world import World, deployment
from vtoken.results.outcome import Outcome
from vtoken.serving.settings import DeploymentSettings

SETTINGS = EXACT
OWN_FLEET = True

STREAMS, TOKENS, QUICK_TOKENS, BEGUN = 12, 600, 300, 5
LOOPS = 4


def run(world: World, quick: bool) -> Outcome:
    """Deploy other settings, and wait until no old replica is left; every answer must be whole."""
    outcome = Outcome("drill-rolling-update")
    changed = {**SETTINGS, "failover": {"wait_s": 61.0}}
    settings = DeploymentSettings.from_args(deployment(world.local.settings.model, changed))
    with unary_loops(world, LOOPS) as loops:
        traffic, streams = begin_streams(world, STREAMS, QUICK_TOKENS if quick else TOKENS, BEGUN)
        old = set(world.local.replica_pids())
        world.local.update(settings)
        outcome.values["updated_after_s"] = round(recover(world, old), 1)
        world.progress(f"both replicas are new; {failovers(world)}")
        traffic.join()
    judge_answers(outcome, "stream", streams)
    judge_answers(outcome, "unary", loops.recordings)
    return outcome
