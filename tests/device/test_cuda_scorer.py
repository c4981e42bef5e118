"""The scorer of CUDA against the definition of attention mass; it asks in one step and takes in a later one.

Streams are simulated, kernels interpreted; on a machine with a GPU both are real.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device.paged import DEVICE, needs_kernels
from tests.device.test_scorer import DIM, HEADS, SCALE, SIZE, WINDOW, Bench
from vtoken.core.scores import Needs
from vtoken.device.cuda_layout import keys_of, values_of
from vtoken.device.cuda_scorer import CudaScorer, ScorerRoom
from vtoken.device.cuda_streams import CudaStreams, Lane
from vtoken.device.event_model import SimulatedStreams, compute_first

pytestmark = needs_kernels
ROOM = ScorerRoom(requests=2, tokens=64, length=96, heads=HEADS)
PADDING = 3
"""Queries of nobody behind each step's, as in a captured graph."""


class CudaBench(Bench):
    """The same requests in the layout of CUDA."""

    def __init__(self, seed: int = 1, steps_ahead: int = 0, room: ScorerRoom = ROOM) -> None:
        super().__init__(seed)
        self.streams = CudaStreams(DEVICE) if DEVICE.type == "cuda" else SimulatedStreams(compute_first)
        self.caches = {name: cache.to(DEVICE) for name, cache in self.caches.items()}
        self.scorer = CudaScorer(self.streams, 2, WINDOW, room, steps_ahead)
        self.scorer.bind(self.caches)

    def step(self, counts: dict[str, int]) -> None:
        self.scorer.flush()  # as after all decisions of a step
        starts = np.cumsum([0, *counts.values()])
        for name, count in counts.items():
            table = self.rows[name].table
            while (len(table.blocks) * SIZE) < table.tail + count:
                table.add_blocks([self.free.pop()])
            self.rows[name].write_slots = table.sync_new_tokens(table.total + count)
        tokens = int(starts[-1]) + PADDING
        kept = self.scorer.plan([self.rows[name] for name in counts], starts, tokens)
        for layer in self.caches:
            query = torch.randn(tokens, HEADS, DIM, generator=self.source)
            for name, start, end in zip(counts, starts, starts[1:], strict=False):
                self._write(name, layer, query[start:end])
            if kept and self.scorer.observes(layer):
                self.scorer.observe(layer, query.to(DEVICE), SCALE, tokens)
        self.scorer.after_forward()

    def _write(self, name: str, layer: str, query: torch.Tensor) -> None:
        keys, values = torch.randn(2, len(query), 2, DIM, generator=self.source)
        block, offset = (torch.from_numpy(part) for part in divmod(self.rows[name].write_slots, SIZE))
        halves = ((keys_of, keys), (values_of, values))

        def work() -> None:
            for half, numbers in halves:
                half(self.caches[layer])[block, :, offset] = numbers.to(DEVICE)

        self.streams.run(Lane.COMPUTE, work)
        self.content[name][layer] += list(torch.stack([query, *(one.repeat_interleave(3, 1) for _, one in halves)], 1))


def masses(bench: CudaBench, name: str) -> np.ndarray:
    return bench.ledger(name).of(np.arange(bench.rows[name].table.total)).total


@pytest.mark.parametrize("prompt", [[1], [5], [7, 20, 1, 11]], ids=str)
def test_every_query_is_counted_once_whatever_the_chunks(prompt: list[int]) -> None:
    bench = CudaBench()
    bench.add("a"), bench.add("b"), bench.add("quiet", Needs.NOTHING)
    for chunk in prompt:
        bench.step({"b": 2, "a": chunk, "quiet": 1})
    for _ in range(WINDOW - 1 - prompt.count(1)):
        bench.step({"a": 1})
    table = bench.rows["a"].table
    bench.scorer.ask("a", table)
    found = bench.ledger("a").of(np.arange(table.total))
    assert found.queries == table.total == found.window_queries.sum()
    wanted = bench.expected("a", [np.arange(q + 1) for q in range(table.total)])
    np.testing.assert_allclose(found.total, wanted, atol=1e-4)
    np.testing.assert_allclose(found.last.sum(), 1.0, rtol=1e-4)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_decision_is_ready_so_many_of_its_own_steps_after_it_was_asked_for(steps_ahead: int) -> None:
    bench = CudaBench(steps_ahead=steps_ahead)
    row = bench.add("a")
    bench.step({"a": 6})
    for _ in range(steps_ahead + 1):
        assert not bench.scorer.ready("a", row.table)
        bench.step({"a": 1})
    assert bench.scorer.ready("a", row.table)
    found = bench.ledger("a").of(np.arange(7))
    assert found.queries == 6, "what came after the question is counted with the next one"
    np.testing.assert_allclose(found.total, bench.expected("a", [np.arange(q + 1) for q in range(6)])[:7], atol=1e-4)


def test_a_decision_knows_of_all_queries_up_to_its_question_even_if_a_full_ring_was_asked_for_just_before() -> None:
    bench = CudaBench()
    row = bench.add("a")
    bench.step({"a": 6})
    bench.scorer.ask("a", row.table)
    bench.step({"a": 1}), bench.step({"a": 1})
    assert not bench.scorer.ready("a", row.table)
    bench.step({"a": 1})
    assert bench.scorer.ready("a", row.table)
    assert bench.ledger("a").queries == 8


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the device's progress is prescribed")
@pytest.mark.parametrize(("too_early", "stands_still"), [(0, False), (1, True)])
def test_nobody_waits_for_a_device_that_is_as_far_behind_as_the_engine_allows(too_early, stands_still) -> None:
    """Before a step is planned the engine has the output of the one before the last."""
    bench = CudaBench(steps_ahead=1)
    bench.scorer._delay -= too_early
    row, streams, outputs, decided = bench.add("a"), bench.streams, [], 0
    streams.log.clear()
    streams.decide = lambda streams, lanes, must: lanes[0] if must else None
    for step in range(2 * WINDOW + 3):
        while step >= 2 and outputs[step - 2].reached < outputs[step - 2].recorded:
            streams._step(Lane.COMPUTE)
        if bench.scorer.overdue("a"):
            bench.scorer.ask("a", row.table)
        if step > 4 and bench.scorer.ready("a", row.table):
            decided += bench.ledger("a").queries > 0
        bench.step({"a": 1})
        outputs.append(streams.event())
        streams.record(Lane.COMPUTE, outputs[-1])
    assert decided > 2
    assert ("host blocks" in streams.log, bench.scorer.waits > 0) == (stands_still, stands_still)


@pytest.mark.parametrize("flushed", [True, False])
def test_what_was_asked_is_of_its_moment_once_it_is_flushed(flushed: bool) -> None:
    """Tokens move and the next queries take the rings' places; the two requests share a launch."""
    bench = CudaBench()
    rows = [bench.add("a"), bench.add("b")]
    for _ in range(3):
        bench.step({"a": 1, "b": 1})
    before = bench.scorer._mass.launches
    for row in rows:
        bench.scorer.ask(row.request_id, row.table)
    if flushed:
        bench.scorer.flush()
    for tensor in (*bench.caches.values(), *bench.scorer._queries.values()):
        tensor.zero_()
    wanted = {name: bench.expected(name, [np.arange(q + 1) for q in range(3)]) for name in ("a", "b")}
    right = [bool(np.allclose(masses(bench, name), mass, atol=1e-4)) for name, mass in wanted.items()]
    assert right == [flushed] * 2
    assert bench.scorer._mass.launches == before + 1


@pytest.mark.parametrize("flushed", [True, False])
def test_requests_that_end_give_their_room_back_even_while_they_are_asked_about(flushed: bool) -> None:
    bench = CudaBench()
    for life in range(6):  # more than there are answers
        row = bench.add(f"{life}")
        bench.step({f"{life}": 1})
        bench.scorer.ask(f"{life}", row.table)
        if flushed:
            bench.scorer.flush()
        bench.scorer.forget(f"{life}")
        bench.free = list(range(80))
    last = bench.add("last")
    bench.step({"last": 1})
    bench.scorer.ask("last", last.table)
    np.testing.assert_allclose(masses(bench, "last"), [1.0], atol=1e-5)
    bench.scorer.forget("nobody")


def test_more_questions_than_answers_wait_for_the_oldest() -> None:
    bench = CudaBench(room=ScorerRoom(requests=1, tokens=64, length=96, heads=HEADS))
    row = bench.add("a")
    for _ in range(5):
        bench.step({"a": 1})
        bench.scorer.ask("a", row.table)
    assert bench.ledger("a").queries == 5
    np.testing.assert_allclose(masses(bench, "a"), bench.expected("a", [np.arange(q + 1) for q in range(5)]), atol=1e-4)


def test_without_room_nothing_is_looked_at_but_keys() -> None:
    bench = CudaBench(room=ScorerRoom(requests=0, tokens=64, length=96, heads=HEADS))
    row = bench.add("a")
    bench.step({"a": 9})
    assert bench.scorer.ready("a", row.table)
    assert (bench.scorer.drain("a", row.table), bench.scorer.bytes) == ([], 0)
    contents = [torch.stack(bench.content["a"][layer])[:, 1, ::3].norm(dim=2).mean(1) for layer in bench.scorer._caches]
    np.testing.assert_allclose(bench.scorer.keys(row.table).key_norms, torch.stack(contents).mean(0), rtol=1e-5)
    assert (bench.scorer.waits, bench.scorer.decision_waits) == (0, 1), "looking at keys waits by its nature"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the device's progress is prescribed")
@pytest.mark.parametrize("after_a_chunk", [True, False])
def test_a_decision_after_a_chunk_waits_by_its_nature_and_one_while_decoding_does_not(after_a_chunk) -> None:
    bench = CudaBench()
    row = bench.add("a")
    bench.streams.decide = lambda streams, lanes, must: lanes[0] if must else None
    bench.step({"a": 6})
    if not after_a_chunk:
        bench.scorer.ready("a", row.table)
    assert bench.ledger("a").queries == 6
    counted = bench.scorer.waits, bench.scorer.decision_waits
    assert [number > 0 for number in counted] == [not after_a_chunk, after_a_chunk]


def test_a_step_is_planned_once_however_many_kinds_of_layers_ask() -> None:
    bench = CudaBench()
    row = bench.add("a")
    bench.step({"a": 1})
    before = len(bench.scorer._rings["a"].ids)
    assert bench.scorer.plan([], [0], PADDING) is False, "a batch of nobody between steps"
    for _ in range(2):
        assert bench.scorer.plan([row], [0, 1], 1)
    assert len(bench.scorer._rings["a"].ids) == before + 1
