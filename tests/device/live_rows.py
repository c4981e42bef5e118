"""Rows of live slots, caches with NaN in every dead one, and what attention over them must give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.device.paged import filled
from vtoken.device.cuda_layout import keys_of, values_of
from vtoken.device.cuda_rows import LiveRow


@dataclass(frozen=True)
class Step:
    """What a reader is filled with: the rows that it serves, and where each row of the batch begins."""

    rows: list[LiveRow]
    starts: np.ndarray

    def __iter__(self):
        return iter((self.rows, self.starts))

    @property
    def slots(self):
        return np.concatenate([row.slots for row in self.rows])

    @property
    def longest(self):
        return max(len(row.slots) for row in self.rows)


def rows_of(*rows):
    """From (live slots, first query token, behind the last); nobody reads for the tokens between."""
    starts, found = [0], []
    for place, (slots, first, end) in enumerate(rows):
        if first > starts[-1]:
            starts.append(first)
        found.append(LiveRow(len(starts) - 1, place, np.asarray(slots, np.int64)))
        starts.append(end)
    return Step(found, np.array(starts, np.int32))


def reference(query, cache, step, scale, soft_cap=0.0):
    """float64, head by head; only the rows' tokens."""
    wanted, size = {}, cache.shape[2]
    group = query.shape[1] // cache.shape[1]
    for row in step.rows:
        start, end = step.starts[row.index : row.index + 2].tolist()
        slots = torch.from_numpy(row.slots).to(cache.device)
        keys, values = (half(cache)[slots // size, :, slots % size].double() for half in (keys_of, values_of))
        for token in range(start, end):
            seen = len(slots) - (end - 1 - token)
            found = []
            for head in range(query.shape[1]):
                logits = keys[:seen, head // group] @ query[token, head].double() * scale
                logits = soft_cap * (logits / soft_cap).tanh() if soft_cap else logits
                found.append(logits.softmax(0) @ values[:seen, head // group])
            wanted[token] = torch.stack(found)
    return wanted


def poisoned(cache, live):
    """Ordinary numbers in the live slots, NaN everywhere else."""
    size = cache.shape[2]
    kept = torch.zeros(cache.shape[0] * size, dtype=torch.bool)
    kept[torch.from_numpy(np.asarray(live))] = True
    filled({"": cache})
    cache.masked_fill_(~kept.view(-1, 1, size, 1).to(cache.device), float("nan"))
    return cache


ROWS = rows_of(([37], 0, 1), ([90, 3, 17, 18, 33], 2, 4), ([5, 1, 80, 64, 66, 67, 40], 6, 7))


class Lives:
    """Requests at the places of an engine: they grow, lose tokens, move, end, and others take their places."""

    def __init__(self, seed, places=4, slots=96, longest=20):
        self.rng = np.random.default_rng(seed)
        self.slots, self.longest = slots, longest
        self.lists = {place: self._unused(np.empty(0, np.int64), 3) for place in range(places)}

    def _unused(self, taken, count):
        return self.rng.permutation(np.setdiff1d(np.arange(self.slots), taken))[:count]

    def step(self):
        """Something happens to every request."""
        for place, old in self.lists.items():
            event = self.rng.choice(["grows", "grows", "grows", "evicts", "moves", "ends"])
            new = old.copy()
            if event == "evicts":
                new = np.sort(self.rng.permutation(len(old))[: max(len(old) // 2, 1)])
                new = old[new]
            elif event == "moves":
                moved = self.rng.integers(len(old))
                new[moved] = self._unused(old, 1)[0]
            if event == "ends" or len(new) == self.longest:
                new = np.empty(0, np.int64)
            room = min(self.longest - len(new), 4)
            self.lists[place] = np.append(new, self._unused(new, self.rng.integers(1, room + 1)))

    def batch(self):
        """Some of the requests in any order, one to three tokens each; the strict reader serves some of them."""
        order = self.rng.permutation(list(self.lists))[: self.rng.integers(len(self.lists) + 1)]
        asked = [int(self.rng.integers(1, min(len(self.lists[place]), 3) + 1)) for place in order]
        rows = [LiveRow(i, int(place), self.lists[place]) for i, place in enumerate(order) if self.rng.random() < 0.7]
        return Step(rows, np.cumsum([0, *asked]).astype(np.int32))
