"""Rows of live slots, caches with NaN in every dead one, and what attention over them must give."""

from __future__ import annotations

import numpy as np
import torch

from tests.device.paged import filled
from vtoken.device.cuda_layout import keys_of, values_of
from vtoken.device.strict_reader import StrictRows


def rows_of(*rows):
    """From (live slots, first query token, behind the last)."""
    slots = np.concatenate([np.asarray(one[0], np.int64) for one in rows])
    return StrictRows(slots, np.cumsum([0, *(len(one[0]) for one in rows)]), np.array([one[1:] for one in rows]))


def reference(query, cache, rows, scale, soft_cap=0.0):
    """float64, head by head; only the rows' tokens."""
    wanted, size = {}, cache.shape[2]
    group = query.shape[1] // cache.shape[1]
    for index, (start, end) in enumerate(rows.query_ptr.tolist()):
        slots = torch.from_numpy(rows.slots[rows.row_ptr[index] : rows.row_ptr[index + 1]]).to(cache.device)
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
