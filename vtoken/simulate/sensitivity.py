"""Q6, sensitivity: how full memory is and how much is moved, by every setting that reclamation has.

Requests of PROMPT tokens grow in step to TOTAL under `random`, on the pure core and a counted pool that is never short
(`lockstep`): nothing but the settings decides. One setting is varied along a surface, another from line to line; the
others stay at BASE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from vtoken.core.config import VTokenConfig
from vtoken.core.kernels import Kernels
from vtoken.core.occupancy import occupancy
from vtoken.core.table import NUMPY
from vtoken.simulate.frontier import VARIANTS
from vtoken.simulate.lockstep import SINGLE_STEPS, LockStep

PROMPT, TOTAL = 256, 1280


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of everything; `relocation` is a name of VARIANTS."""

    relocation: str = "lazy"
    theta_f: float = 0.25
    keep_ratio: float = 0.5
    block_size: int = 16
    interval_tokens: int = 32
    headroom_blocks: int = 8
    requests: int = 4

    def config(self) -> VTokenConfig:
        """The engine's configuration."""
        policy = {"policy": "random", "keep_ratio": self.keep_ratio, "interval_tokens": self.interval_tokens}
        settings = {"policy": policy, **VARIANTS[self.relocation]}
        if self.relocation == "lazy":
            settings |= {"theta_f": self.theta_f, "headroom_blocks": self.headroom_blocks}
        return VTokenConfig.from_mapping(settings)


BASE = Point()
THETAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.75, 0.9)
RATIOS = (0.3, 0.4, 0.5, 0.6, 0.7)
MOVING = ("lazy", "eager")

SURFACES: dict[str, Iterable[dict[str, Any]]] = {
    "theta_f": [{"theta_f": theta, "keep_ratio": ratio} for ratio, theta in product(RATIOS, THETAS)],
    "block_size": [
        {"block_size": size, "relocation": one} for one, size in product(("naive", *MOVING), (16, 32, 48))
    ],
    "interval_tokens": [
        {"interval_tokens": tokens, "relocation": one} for one, tokens in product(MOVING, (8, 16, 32, 64, 128))
    ],
    "headroom_blocks": [
        {"headroom_blocks": blocks, "requests": count} for count, blocks in product((1, 4, 16), (0, 1, 2, 4, 8, 16, 32))
    ],
}  # fmt: skip
"""By the setting that is varied: what differs from BASE."""

AROUND = (0.2, 0.3)
"""Neighbours of the default `theta_f`: the paper found its results flat there."""


def sensitivity(kernels: Kernels = NUMPY) -> Iterator[dict[str, Any]]:
    """A row per point of every surface: the settings, and what came of them."""
    for surface, changes in SURFACES.items():
        for change in changes:
            point = replace(BASE, **change)
            yield {"surface": surface, **asdict(point), **measure(point, kernels)}


def measure(point: Point, kernels: Kernels = NUMPY) -> dict[str, float]:
    """Means over the steps behind the first decision; moves and freed blocks of the whole run.

    Raises:
        ValueError: the pool was short, so the settings alone did not decide.
    """
    blocks = 2 * point.requests * TOTAL // point.block_size + point.headroom_blocks
    group = LockStep(point.config(), blocks, point.requests, PROMPT, point.block_size, kernels)
    samples: list[tuple[int, float, float]] = []
    for tokens in _steps(point.interval_tokens):
        if not group.step(tokens):
            raise ValueError(f"{blocks} blocks are too few for {point}")
        found = occupancy(group.shard.rows.values(), point.block_size)
        slots = found["allocated_blocks"] * point.block_size
        if group.shard.counters.tokens_evicted_total:
            samples.append((tokens, 1 - found["live_tokens"] / slots, found["allocated_blocks"] / point.requests))
    weights, waste, held = np.array(samples).T
    counters = group.shard.counters
    return {
        "waste": round(float(np.average(waste, weights=weights)), 4),
        "blocks_per_request": round(float(np.average(held, weights=weights)), 2),
        "moves": counters.moves_total,
        "moves_per_freed_block": round(counters.moves_total / max(counters.blocks_released_total, 1), 2),
    }


def _steps(interval: int) -> Iterator[int]:
    """Tokens of each step: the prompt, then by intervals, in single steps first."""
    yield PROMPT
    for _ in range((TOTAL - PROMPT) // interval):
        yield from (*[1] * SINGLE_STEPS, interval - SINGLE_STEPS)


def judge(points: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """What the surfaces say about the defaults, and whether they justify eager relocation and blocks of 16.

    Eager must waste less than lazy does at any `theta_f`, for no more moves than lazy's at its default; and no other
    block size may hold fewer slots.
    """
    thetas = {(one["keep_ratio"], one["theta_f"]): one for one in points if one["surface"] == "theta_f"}
    sizes = {(one["relocation"], one["block_size"]): one for one in points if one["surface"] == "block_size"}
    eager, lazy = sizes["eager", BASE.block_size], thetas[BASE.keep_ratio, BASE.theta_f]
    best = min(one["waste"] for (ratio, _), one in thetas.items() if ratio == BASE.keep_ratio)
    held = {size: round(one["blocks_per_request"] * size, 1) for (by, size), one in sizes.items() if by == "eager"}
    near = [abs(thetas[r, theta]["waste"] - thetas[r, BASE.theta_f]["waste"]) for r in RATIOS for theta in AROUND]
    values = {
        "eager_waste": eager["waste"], "eager_moves": eager["moves"], "lazy_waste": lazy["waste"],
        "lazy_moves": lazy["moves"], "best_lazy_waste": best, "slots_per_request_by_block_size": held,
        "largest_change_of_waste_near_default_theta_f": round(max(near), 4),
    }  # fmt: skip
    fits = min(held, key=lambda size: held[size]) == BASE.block_size
    return values, eager["waste"] < best and eager["moves"] <= lazy["moves"] and fits
