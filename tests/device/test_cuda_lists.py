"""Lists that stay on the device: only what is new travels, and a line always begins with its request's list."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device.live_rows import Lives
from vtoken.device.cuda_lists import HeldLists
from vtoken.device.errors import BadSlots
from vtoken.device.event_model import SimulatedStreams, compute_first


def live_through(held, steps=60, seed=1):
    """Everything is compared with the lists themselves after every step; what travels if all of it does."""
    lives, all_of_it, address = Lives(seed), 0, held.table.data_ptr()
    for _ in range(steps):
        lives.step()
        rows = lives.batch().rows
        held.put([(row.place, row.slots) for row in rows])
        for row in rows:
            assert held.table[row.place, : len(row.slots)].tolist() == row.slots.tolist()
        all_of_it += sum(len(row.slots) for row in rows)
    assert held.table.data_ptr() == address
    return all_of_it


def held_lists(kind=HeldLists, **room):
    return kind(SimulatedStreams(compute_first), places=4, width=20, **room)


@pytest.mark.parametrize("room", [{}, {"room": 5}], ids=["at once", "in pieces"])
def test_a_line_always_begins_with_its_list_and_only_what_is_new_travels(room):
    held = held_lists(**room)
    assert held.sent < live_through(held)


class GrowsOnly(HeldLists):
    """Takes it for granted that what was sent is still so."""

    def _news(self, place, numbers):
        known = int((self._known[place] > 0).sum())
        self._known[place, : len(numbers)] = 1
        first = min(known, len(numbers))
        return place * 20 + np.arange(first, len(numbers)), numbers[first:]


class FirstOnly(HeldLists):
    """Sends what differs, not what lies behind it."""

    def _news(self, place, numbers):
        where, what = super()._news(place, numbers)
        return where[:1], what[:1]


@pytest.mark.parametrize("kind", [GrowsOnly, FirstOnly])
def test_a_stale_line_is_found(kind):
    with pytest.raises(AssertionError):
        live_through(held_lists(kind))


def test_a_row_that_has_grown_sends_its_new_numbers_and_one_that_was_rebuilt_the_rest():
    held = held_lists()
    lists = {place: np.arange(place, place + 9) for place in range(4)}
    held.put(list(lists.items()))
    for _ in range(10):
        before = held.sent
        lists = {place: np.append(numbers, 90) for place, numbers in lists.items()}
        held.put(list(lists.items()))
        assert held.sent == before + 4, "one slot per row and step"
    before = held.sent
    held.put([(2, np.delete(lists[2], 15)), (3, lists[3]), (0, lists[0][:5])])
    assert held.sent == before, "these are the beginnings of what was there: nothing is new"
    held.put([(1, np.delete(lists[1], 3))])
    assert held.sent == before + 15, "from the first that differs, equal ones behind it included"


def test_a_rebuild_that_is_larger_than_the_buffers_goes_in_pieces_and_may_wait():
    streams = SimulatedStreams(lambda streams, lanes, must: lanes[0] if must else None)
    held = HeldLists(streams, places=4, width=20, room=4)
    held.put([(place, np.arange(20) + place) for place in range(4)])
    assert held.waits == 17, "20 pieces through 3 buffers, with a device that runs when it must"
    while streams.ready_lanes():
        streams._step(streams.ready_lanes()[0])
    assert held.table.tolist() == [list(range(place, place + 20)) for place in range(4)]


@pytest.mark.parametrize("wrong", [(1, np.arange(21)), (4, np.arange(2)), (-1, np.arange(2))], ids=str)
def test_what_has_no_room_is_refused_and_nothing_has_changed(wrong):
    held = held_lists()
    with pytest.raises(BadSlots, match="in 4 lists of up to 20"):
        held.put([(0, np.arange(1, 5)), wrong])
    assert not held.table.any()
    held.put([(0, np.arange(1, 5))])
    assert held.sent == 4
