"""Comparing and hashing tokens bit by bit with plain tensor operations, on whatever device their caches are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vtoken.device.copy_engine import Slots
from vtoken.device.cuda_layout import bits_of


def token_bits(cache: torch.Tensor, slots: Slots) -> torch.Tensor:
    """K and V of tokens as integers, [k, kv_heads * 2 * D], a copy."""
    bits, size = bits_of(cache), cache.shape[2]
    places = torch.from_numpy(slots.copy()).to(cache.device)
    return bits[places // size, :, places % size].flatten(1)


def differing(caches: Iterable[torch.Tensor], src: Slots, dst: Slots) -> torch.Tensor:
    """Number of (layer, token) pairs whose bits differ; a scalar on the caches' device."""
    pairs = [(token_bits(cache, src) != token_bits(cache, dst)).any(1).sum() for cache in caches]
    return torch.stack(pairs).sum()


def hashed(caches: Iterable[torch.Tensor], slots: Slots) -> torch.Tensor:
    """A hash of the tokens' bits in all layers, in the order given; an int64 scalar on the caches' device.

    Sum of element times an odd number of its place, modulo 2^64: a single changed element changes the sum, since an
    odd factor loses no difference.
    """
    total = torch.zeros((), dtype=torch.int64)
    place = 0
    for cache in caches:
        bits = token_bits(cache, slots).flatten().to(torch.int64)
        factors = _scattered(torch.arange(place, place + len(bits), device=bits.device)) | 1
        total = total.to(bits.device) + (bits * factors).sum()
        place += len(bits)
    return total


def _scattered(numbers: torch.Tensor) -> torch.Tensor:
    """Neighbours mapped far apart (the finaliser of splitmix64), so that exchanged elements do not cancel out."""
    mixed = numbers * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return mixed ^ (mixed >> 31)
