"""The worker's substrate over the CUDA engine, on streams that run in random orders: nothing is read half moved.

tests/device/test_cuda_events.py tries every order of a few verbs; here whole requests live, with the real decisions.
"""

from __future__ import annotations

import pytest

from tests.engine.cuda_bench import Bench, live_through
from vtoken.core.config import Relocation
from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.event_model import Violation


@pytest.mark.parametrize("relocation", Relocation)
@pytest.mark.parametrize("seed", range(6))
def test_every_forward_reads_its_tokens_in_any_order_of_the_device(seed: int, relocation: Relocation) -> None:
    bench = Bench(seed, relocation)
    live_through(bench)
    assert bench.substrate.shard.counters.moves_total > 0
    assert bench.substrate.shard.counters.blocks_released_total > 0
    bench.substrate.shard.check_invariants()


def test_what_decisions_have_asked_for_is_enqueued_before_tokens_move(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, happened = Bench(1, Relocation.EAGER), []

    def noting(owner: object, name: str) -> None:
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (happened.append(name), work(*given))[1])

    noting(bench.substrate.shard, "decide"), noting(bench.substrate.scorer, "flush"), noting(bench.copies, "copy")
    live_through(bench)
    assert "copy" in happened
    assert {happened[i - 1] for i, name in enumerate(happened) if name == "copy"} == {"flush"}


class NeverWaits(CudaCopyEngine):
    """Urgent commits, without the wait on the device."""

    def join(self, ticket) -> None:
        self._launched(ticket)


def test_a_missing_wait_is_seen_here_too() -> None:
    def some_seed() -> None:
        for seed in range(20):
            live_through(Bench(seed, Relocation.LAZY, NeverWaits))

    with pytest.raises(Violation):
        some_seed()
