"""One contract, every engine: the compiled one, that of CUDA, and their dumb twin.

CUDA's runs on simulated streams with interpreted kernels; on a machine with a GPU also on the real ones.
"""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.device.paged import DEVICE, needs_kernels
from tests.device.torch_twin import TorchTwinEngine
from vtoken.core.errors import UnsupportedError
from vtoken.device.copy_engine import TicketState
from vtoken.device.cpu_copy import CpuCopyEngine
from vtoken.device.cuda_copy import CudaCopyEngine
from vtoken.device.cuda_streams import CudaStreams
from vtoken.device.errors import BadSlots, CopyCancelled, CopyFailed, EngineStateError
from vtoken.device.event_model import SimulatedStreams, compute_first


def cuda_engine(**settings):
    streams = CudaStreams(DEVICE) if DEVICE.type == "cuda" else SimulatedStreams(compute_first)
    return CudaCopyEngine(streams, segments=3, moves_per_launch=16, **settings)


ENGINES = [
    pytest.param(CpuCopyEngine, id="cpu"),
    pytest.param(TorchTwinEngine, id="twin"),
    pytest.param(cuda_engine, id="cuda", marks=needs_kernels),
    pytest.param(lambda: cuda_engine(in_stream=True), id="cuda-in-stream", marks=needs_kernels),
]
BLOCKS, BLOCK_SIZE = 6, 16


def make_caches(dtype=torch.bfloat16, blocks=BLOCKS, block_size=BLOCK_SIZE, device="cpu"):
    """Two layers of different width; every element has bits of its own, NaN patterns included."""
    integer = torch.int32 if dtype.itemsize == 4 else torch.int16
    limit = 2 ** (8 * dtype.itemsize - 1)
    shapes = {"layers.0": (blocks, 2, block_size, 64), "layers.1": (blocks, 1, block_size, 160)}
    return {n: torch.randint(-limit, limit, s, dtype=integer, device=device).view(dtype) for n, s in shapes.items()}


def bits(caches):
    return {n: c.view(torch.int32 if c.dtype.itemsize == 4 else torch.int16).clone() for n, c in caches.items()}


def key_place(cache, slot, dim, paged):
    """Flat place of one element of a token's key, first head, in the packing of the CPU or of CUDA."""
    _, heads, size, row = cache.shape
    block, offset = divmod(slot, size)
    first = block * heads * size * row
    return first + (offset * row + dim if paged else dim * size + offset)


def value_place(cache, slot, dim, paged):
    """The same of its value."""
    _, heads, size, row = cache.shape
    block, offset = divmod(slot, size)
    first = block * heads * size * row
    return first + (offset * row + row // 2 + dim if paged else size * row // 2 + offset * row // 2 + dim)


def expected(before, src, dst, paged=False):
    """What each layer must hold after the move, by the definition of the layout, token by token."""
    after = {}
    for name, old in before.items():
        blocks, heads, size, width = old.shape
        new, dim = old.clone(), width // 2
        for cache in (old, new):
            assert cache.is_contiguous()
        flat_old, flat_new = (x.view(blocks, heads, 2, size * dim) for x in (old, new))
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            (sb, so), (db, do) = divmod(s, size), divmod(d, size)
            if paged:
                new[db, :, do] = old[sb, :, so]
                continue
            flat_new[db, :, 0, do::size] = flat_old[sb, :, 0, so::size]
            flat_new[db, :, 1, do * dim : (do + 1) * dim] = flat_old[sb, :, 1, so * dim : (so + 1) * dim]
        after[name] = new
    return after


def slots(*values):
    return np.array(values, np.int64)


def assert_holds(caches, wanted):
    found = bits(caches)
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@pytest.fixture(params=ENGINES)
def engine(request):
    engine = request.param()
    yield engine
    engine.close()
    assert not [t for t in threading.enumerate() if t.name == "vtoken-copy"], "close() left its thread behind"


@pytest.fixture
def paged(engine):
    return isinstance(engine, CudaCopyEngine)


@pytest.fixture
def device(paged):
    return DEVICE if paged else "cpu"


@pytest.fixture
def caches(device):
    return make_caches(device=device)


@pytest.fixture
def expect(paged):
    return functools.partial(expected, paged=paged)


@pytest.fixture
def bound(engine, caches):
    engine.bind(caches)
    return engine


moves = {
    "one": (slots(3), slots(40)),
    "none": (slots(), slots()),
    "scattered": (slots(90, 1, 33, 17), slots(0, 95, 34, 2)),
    "run": (np.arange(4, 9), np.arange(40, 45)),
    "whole-block": (np.arange(16, 32), np.arange(64, 80)),
    "across-blocks": (np.arange(10, 40), np.arange(51, 81)),
    "one-to-two": (slots(5, 5), slots(20, 70)),
}


@pytest.mark.parametrize("move", moves.values(), ids=moves)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_copy_keeps_sources_fills_targets_and_leaves_neighbours(engine, dtype, move, device, expect):
    caches = make_caches(dtype, device=device)
    engine.bind(caches)
    before = bits(caches)
    engine.copy(*move)
    assert_holds(caches, expect(before, *move))
    assert engine.verify(*move) == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), block_size=st.sampled_from([16, 32]), runs=st.booleans())
def test_any_disjoint_move(seed, block_size, runs):
    rng = np.random.default_rng(seed)
    caches = make_caches(block_size=block_size)
    count = rng.integers(1, BLOCKS * block_size // 2)
    places = rng.permutation(BLOCKS * block_size)[: 2 * count]
    src, dst = places[:count], places[count:]
    if runs:  # ascending on both sides, so that neighbours meet
        src, dst = np.sort(src), np.sort(dst)
    before = bits(caches)
    engine = CpuCopyEngine()
    engine.bind(caches)
    engine.copy(src, dst)
    assert_holds(caches, expected(before, src, dst))


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (slots(1, 2), slots(3), "2 sources for 1 destinations"),
        (slots(1, 2), slots(3, 3), "slot 3 is the destination of two tokens"),
        (slots(1, 2), slots(2, 5), "slot 2 is a source and a destination"),
        (slots(96), slots(1), "src spans 96..96.*slots 0..95"),
        (slots(1), slots(-1), "dst spans -1..-1"),
        (np.array([1], np.int32), slots(2), "int32"),
        (np.array([[1]]), slots(2), "one-dimensional"),
    ],
)
@pytest.mark.parametrize("verb", ["copy", "submit"])
def test_refused_moves_change_nothing(bound, caches, verb, src, dst, message):
    bound.start()
    before = bits(caches)
    with pytest.raises(BadSlots, match=message):
        getattr(bound, verb)(src, dst)
    assert_holds(caches, before)
    assert bound.counters().copies == 0


def test_submit_wait_and_poll(bound, caches, expect):
    before = bits(caches)
    src, dst = slots(0, 17, 34), slots(50, 66, 80)
    bound.start()
    ticket = bound.submit(src, dst)
    wanted_src, wanted_dst = src.copy(), dst.copy()
    src[:], dst[:] = 95, 94  # the engine works on its own copies
    bound.wait(ticket)
    assert bound.poll(ticket)
    assert ticket.state is TicketState.DONE
    assert ticket.error is None
    assert_holds(caches, expect(before, wanted_src, wanted_dst))


def test_tickets_run_in_order(bound, caches, expect):
    before = bits(caches)
    bound.start()
    hops = [(slots(0), slots(20)), (slots(20), slots(40)), (slots(40), slots(60))]
    tickets = [bound.submit(*hop) for hop in hops]
    bound.wait(tickets[-1])
    assert all(bound.poll(ticket) for ticket in tickets)
    assert [ticket.number for ticket in tickets] == [1, 2, 3]
    assert_holds(caches, expect(before, slots(0, 0, 0), slots(20, 40, 60)))


class Gate:
    """Stands in for the engine's move: holds every copy until it is opened, then does it (or breaks)."""

    def __init__(self, monkeypatch, engine, error=None):
        self.entered, self.opened = threading.Event(), threading.Event()
        self.error = error
        if isinstance(engine, CpuCopyEngine):
            target, verb, self.move = engine._thread, "_run", engine._move
        else:
            target, verb = (engine._launcher, "move") if isinstance(engine, CudaCopyEngine) else (engine, "_move")
            self.move = getattr(target, verb)
        monkeypatch.setattr(target, verb, self)

    def __call__(self, *move):
        self.entered.set()
        assert self.opened.wait(10)
        if self.error is not None:
            raise self.error
        self.move(*move)


def test_cancelled_before_it_begins_writes_nothing(bound, caches, monkeypatch, expect):
    gate = Gate(monkeypatch, bound)
    before = bits(caches)
    bound.start()
    first, second = bound.submit(slots(1), slots(50)), bound.submit(slots(2), slots(51))
    assert bound.cancel(second)
    assert not bound.cancel(second)
    gate.opened.set()
    bound.wait(first)
    with pytest.raises(CopyCancelled):
        bound.wait(second)
    assert bound.poll(second)
    assert not bound.cancel(first)
    assert_holds(caches, expect(before, slots(1), slots(50)))
    assert (bound.counters().copies, bound.counters().cancelled) == (1, 1)


def test_a_failure_stays_with_its_ticket(bound, caches, monkeypatch, expect):
    gate = Gate(monkeypatch, bound, error=MemoryError("no pages"))
    gate.opened.set()
    before = bits(caches)
    bound.start()
    broken = bound.submit(slots(1), slots(50))
    with pytest.raises(CopyFailed, match="no pages"):
        bound.wait(broken)
    assert bound.poll(broken)
    assert broken.state is TicketState.FAILED
    assert_holds(caches, before)
    gate.error = None
    bound.wait(bound.submit(slots(1), slots(50)))
    assert_holds(caches, expect(before, slots(1), slots(50)))
    assert (bound.counters().copies, bound.counters().failed) == (1, 1)


def test_poll_and_in_stream_copies_do_not_wait_for_a_running_ticket(monkeypatch):
    caches = make_caches()
    engine = CpuCopyEngine()
    engine.bind(caches)
    gate = Gate(monkeypatch, engine)
    before = bits(caches)
    engine.start()
    ticket = engine.submit(slots(1), slots(50))
    assert gate.entered.wait(10)
    assert not engine.poll(ticket)
    assert not engine.cancel(ticket)
    engine.copy(slots(2), slots(51))
    assert_holds(caches, expected(before, slots(2), slots(51)))
    gate.opened.set()
    engine.close()
    assert engine.poll(ticket)
    assert_holds(caches, expected(before, slots(1, 2), slots(50, 51)))


def test_close_cancels_what_is_queued_and_may_be_repeated(bound, caches, monkeypatch):
    gate = Gate(monkeypatch, bound)
    bound.start()
    tickets = [bound.submit(slots(i), slots(50 + i)) for i in range(3)]
    threading.Timer(0.05, gate.opened.set).start()
    bound.close()
    bound.close()
    assert all(ticket.settled.is_set() for ticket in tickets)
    with pytest.raises(CopyCancelled):
        bound.wait(tickets[-1])
    with pytest.raises(EngineStateError):
        bound.submit(slots(1), slots(2))


def test_verbs_out_of_order_are_refused(engine, caches):
    with pytest.raises(EngineStateError, match="bind"):
        engine.copy(slots(1), slots(2))
    engine.bind(caches)
    with pytest.raises(EngineStateError, match="start"):
        engine.submit(slots(1), slots(2))


def test_verify_counts_layer_token_pairs(bound, caches, paged):
    bound.copy(slots(1, 2, 3), slots(50, 51, 52))
    assert bound.verify(slots(1, 2, 3), slots(50, 51, 52)) == 0
    other = caches["layers.1"]
    flat = other.view(torch.int16).view(-1)
    flat[key_place(other, 51, 7, paged)] ^= 1
    assert bound.verify(slots(1, 2, 3), slots(50, 51, 52)) == 1
    flat[value_place(other, 52, 0, paged)] ^= 1
    assert bound.verify(slots(1, 2, 3), slots(50, 51, 52)) == 2


def test_fingerprint_follows_contents_and_order_not_places(bound, caches, paged):
    live, moved = slots(4, 9, 30, 31), slots(70, 9, 12, 55)
    before = bound.fingerprint(live)
    bound.copy(slots(4, 30, 31), slots(70, 12, 55))
    assert bound.fingerprint(moved) == before
    assert bound.fingerprint(moved[::-1].copy()) != before
    assert 0 <= before < 2**64
    cache = caches["layers.0"]
    flat = cache.view(torch.int16).view(-1)
    flat[value_place(cache, 79, 31, paged)] ^= 1  # nobody's
    assert bound.fingerprint(moved) == before
    flat[key_place(cache, 70, 0, paged)] ^= 1
    assert bound.fingerprint(moved) != before


def test_poison_fills_whole_blocks_only(bound, caches):
    before = bits(caches)
    bound.poison(slots(1, 4))
    for name, cache in caches.items():
        assert cache[[1, 4]].isnan().all()
        rest = [0, 2, 3, 5]
        assert torch.equal(cache.view(torch.int16)[rest], before[name][rest])


def test_counters_add_up(bound):
    bound.copy(slots(1, 2), slots(50, 51))
    bound.copy(slots(), slots())
    bound.start()
    bound.wait(bound.submit(slots(3), slots(52)))
    counted = bound.counters()
    assert (counted.copies, counted.tokens) == (2, 3)
    assert counted.bytes == 3 * (2 * 2 * 32 + 2 * 1 * 80) * 2
    assert counted.seconds >= 0
    assert counted.bytes == counted.tokens * counted.token_bytes
    totals = bound.durations().running_totals()
    assert list(totals.values()) == sorted(totals.values())
    assert totals["+Inf"] == bound.durations().count == counted.copies


def test_layers_that_number_slots_differently_are_refused():
    caches = {"a": torch.empty(2, 1, 16, 64), "b": torch.empty(3, 1, 16, 64)}
    with pytest.raises(UnsupportedError, match="'a' and 'b' differ"):
        CpuCopyEngine().bind(caches)
    with pytest.raises(UnsupportedError, match="no KV cache"):
        CpuCopyEngine().bind({})


def test_a_foreign_packing_is_refused():
    with pytest.raises(UnsupportedError, match="amx"):
        CpuCopyEngine(isa="amx")


def test_read_only_and_strided_arguments_are_accepted():
    caches = make_caches()
    engine = CpuCopyEngine()
    engine.bind(caches)
    before = bits(caches)
    both = np.array([[1, 50], [2, 51]])
    both.flags.writeable = False
    engine.copy(both[:, 0], both[:, 1])
    assert_holds(caches, expected(before, slots(1, 2), slots(50, 51)))
