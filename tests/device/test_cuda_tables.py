"""Tables in place: changed rows are ours, all others the engine's, and the engine's own stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vtoken.device.cuda_lists import HeldLists
from vtoken.device.cuda_rows import DeviceRows, LiveRow, lines_of
from vtoken.device.cuda_tables import ChangedRow, DeviceTables
from vtoken.device.errors import BadSlots
from vtoken.device.event_model import SimulatedStreams, compute_first


def ints(*values):
    return np.array(values, np.int64)


@pytest.fixture
def tables():
    return DeviceTables(SimulatedStreams(compute_first), max_rows=4, max_blocks=6, max_tokens=8)


def test_changed_rows_are_written_over_the_engines_in_buffers_that_do_not_move(tables):
    addresses = (tables.blocks.data_ptr(), tables.lengths.data_ptr())
    for step in range(5):
        table = torch.arange(12, dtype=torch.int32).view(3, 4) + 100 * step
        lengths = torch.tensor([50, 60, 70], dtype=torch.int32)
        mapping = torch.arange(1000, 1006)
        changed = [ChangedRow(1, 3, ints(9, 8, 7, 6, 5 + step), 33 + step, 1, ints(501, 502)),
                   ChangedRow(2, 0, ints(3), 5, 3, ints(77))]  # fmt: skip
        before = table.clone(), lengths.clone()
        blocks, tails = tables.refresh(table, lengths, mapping, changed)
        assert blocks[0, :4].tolist() == table[0].tolist()
        assert blocks[1, :5].tolist() == [9, 8, 7, 6, 5 + step]
        assert blocks[2, 0].item() == 3
        assert tails.tolist() == [50, 33 + step, 5]
        assert mapping.tolist() == [1000, 501, 502, 77, 1004, 1005]
        assert torch.equal(table, before[0])
        assert torch.equal(lengths, before[1])
        assert (blocks.data_ptr(), tails.data_ptr()) == addresses


def test_a_step_without_changed_rows_is_the_engines(tables):
    table, lengths = torch.ones(2, 3, dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    mapping = torch.arange(4)
    blocks, tails = tables.refresh(table, lengths, mapping, [])
    assert torch.equal(blocks[:, :3], table)
    assert torch.equal(tails, lengths)
    assert mapping.tolist() == [0, 1, 2, 3]


def test_what_has_no_room_is_refused(tables):
    table, lengths = torch.ones(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(BadSlots, match="7 blocks with 1 tokens for tables of 4 rows, 6 blocks"):
        tables.refresh(table, lengths, torch.arange(4), [ChangedRow(0, 0, np.arange(7), 1, 0, ints(1))])
    with pytest.raises(BadSlots, match="5 rows"):
        tables.refresh(torch.ones(5, 3, dtype=torch.int32), torch.ones(5, dtype=torch.int32), torch.arange(4), [])


def test_only_what_is_new_travels_and_a_line_always_holds_its_rows_blocks(tables):
    """Requests come, grow, lose blocks, are rebuilt, end, and leave their places to others; rows change places."""
    rng, lists, sent = np.random.default_rng(3), {}, 0
    for _ in range(200):
        place = int(rng.integers(4))
        old = lists.get(place, ints())
        cut = int(rng.integers(len(old) + 1)) if rng.random() < 0.3 else len(old)
        lists[place] = np.append(old[:cut], rng.integers(100, size=int(rng.integers(7 - max(cut, 1)))))
        if not len(lists[place]):
            lists[place] = ints(5)
        order = rng.permutation(sorted(lists))
        changed = [ChangedRow(i, int(one), lists[int(one)], 1, i, ints(i)) for i, one in enumerate(order)]
        blocks, _ = tables.refresh(
            torch.zeros(len(order), 6, dtype=torch.int32),
            torch.ones(len(order), dtype=torch.int32),
            torch.zeros(4, dtype=torch.int64),
            changed,
        )
        for row in changed:
            assert blocks[row.index, : len(row.blocks)].tolist() == row.blocks.tolist()
        sent += sum(map(len, lists.values()))
    assert tables.held.sent < sent / 3
    before = tables.held.sent
    grown = [ChangedRow(0, 0, np.append(lists[0][:5], 200), 1, 0, ints(0))]
    tables.refresh(
        torch.zeros(1, 6, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), grown
    )
    assert tables.held.sent == before + 1


def test_a_host_far_ahead_waits_instead_of_writing_over_what_is_not_read_yet():
    streams = SimulatedStreams(lambda streams, lanes, must: lanes[0] if must else None)
    tables = DeviceTables(streams, max_rows=1, max_blocks=2, max_tokens=2)
    mapping = torch.zeros(1, dtype=torch.int64)
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for step in range(5):
        tables.refresh(table, lengths, mapping, [ChangedRow(0, 0, ints(step), step, 0, ints(step))])
    assert tables.waits == 3, "twice for the step's numbers, once for its list of blocks: the first was there"
    seen = []
    while streams.ready_lanes():
        streams._step(streams.ready_lanes()[0])
        seen.append(mapping.item())
    assert sorted(set(seen)) == [1, 2, 3, 4]


def test_lines_of_rows():
    streams = SimulatedStreams(compute_first)
    buffers = DeviceRows(streams, HeldLists(streams, places=4, width=8), 4)
    rows = [LiveRow(0, 1, ints(32, 35, 17)), LiveRow(2, 3, ints(80, 81, 64))]
    starts = ints(0, 1, 5, 7)
    assert lines_of(rows, starts, 8).tolist() == [[0, 5, 6], [8, 24, 24], [3, 2, 3]]
    buffers.fill(rows, starts)
    assert (buffers.count, buffers.visible.tolist()) == (3, [3, 2, 3, 0])
    assert [buffers.lists.table[place, :3].tolist() for place in (1, 3)] == [[32, 35, 17], [80, 81, 64]]
    for _ in range(9):  # more than there are buffers: nothing after nothing is not sent
        buffers.fill([], ints(0, 1))
    assert (buffers.count, buffers.visible.tolist(), buffers._hosts._buffers[-1][1].recorded) == (0, [0] * 4, 1)
    for wrong in (ints(0, 2), ints(0, 0)):
        with pytest.raises(BadSlots, match="can't have"):
            lines_of([LiveRow(0, 0, ints(1))], wrong, 8)
