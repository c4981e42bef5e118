"""An engine that stands still is told from one that is busy or idle."""

import asyncio
from dataclasses import replace

import pytest

from vtoken.core.telemetry import Snapshot
from vtoken.serving.replica import EngineReplica
from vtoken.serving.stall import EngineStalled, StallWatch

RUNS = Snapshot(running_requests=3, steps_total=7)


def test_requests_that_run_without_a_step_for_too_long_are_a_stall():
    watch = StallWatch(60.0)
    for now_s in (100.0, 130.0, 160.0):
        watch.look(RUNS, now_s)
    with pytest.raises(EngineStalled, match=r"3 requests run, .* for 61 s \(replicas.stall_timeout_s = 60\)"):
        watch.look(RUNS, 161.0)


@pytest.mark.parametrize(
    "between",
    [
        replace(RUNS, steps_total=8),
        replace(RUNS, running_requests=0),
        replace(RUNS, running_requests=0, waiting_requests=2),
    ],
)
def test_a_step_or_a_moment_without_running_requests_is_none(between):
    watch = StallWatch(60.0)
    watch.look(RUNS, 100.0)
    watch.look(between, 150.0)
    for now_s in (155.0, 209.0):
        watch.look(replace(between, running_requests=3), now_s)


class Stands:
    """A replica of which nothing works but the check of its health."""

    def __init__(self):
        self._service, self._stall, self._scaled = self, StallWatch(0.0), False
        self._beating = asyncio.get_running_loop().create_future()

    async def check_health(self):
        pass

    def snapshot(self):
        return RUNS


def test_serves_check_fails_with_it():
    async def check():
        replica = Stands()
        await EngineReplica.check_health(replica)
        await asyncio.sleep(0.01)
        await EngineReplica.check_health(replica)

    with pytest.raises(EngineStalled):
        asyncio.run(check())
