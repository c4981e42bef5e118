"""How long an engine step takes, fitted from a latency grid.

    step = host + layers x (dense(T) + attention) + head(sequences)                          seconds

    T           tokens computed in the step
    dense(T)    everything of a layer that is not attention, straight lines between the grid's points
    head        embedding and last norm by T, output projection and sampler by sequences, straight lines
    attention   only decoding:  a0 + a1 n + a2 K
                with a prompt:  b0 + b1 p + b2 Q + b3 n + b4 K

    n, K        sequences that decode, and the tokens that they attend to, together
    p, Q        prompt tokens in the step; sum over chunks of max(chunk, 256) x (tokens before it + chunk / 2):
                a kernel's tiles are filled by 256 rows, fewer take as long

The a and b are least squares of relative errors over the grid's points that a pool can hold. `host` is what the
scheduler takes between two forward passes; the grid knows nothing of it.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vtoken.core.errors import ConfigError
from vtoken.simulate.compiled import compiled
from vtoken.simulate.workload import Floats

TILE = 256
PER_LAYER = {
    "qkv_proj": 1, "o_proj": 1, "gate_up_proj": 1, "down_proj": 1, "act_fn": 1, "layernorm": 2, "rotary_emb": 1,
}  # fmt: skip
ONCE = ("embedding", "final_layernorm")


class StepTime(NamedTuple):
    """A fitted model, in the form that compiled code takes. Microseconds.

    Attributes:
        dense_us: float64 [2, points]: tokens, and dense(T) over all layers, embedding and last norm included.
        head_us: float64 [2, points]: sequences, and output projection and sampler.
        decode_us: a0, a1, a2. mixed_us: b0 .. b4. Both over all layers.
        host_us: between two steps.
    """

    dense_us: Floats
    head_us: Floats
    decode_us: Floats
    mixed_us: Floats
    host_us: float


@compiled
def line(at: int, curve: Floats) -> float:
    """Straight lines between the points of a curve [2, points], and on from the last two."""
    points, values = curve
    low = max(0, min(int(np.searchsorted(points, at)) - 1, len(points) - 2))
    slope = (values[low + 1] - values[low]) / (points[low + 1] - points[low])
    value: float = values[low] + slope * (max(at, points[0]) - points[low])
    return value


@compiled
def step_seconds(
    model: StepTime, decoding: int, decode_context: float, prompt: int, prompt_work: float, heads: int
) -> float:
    """Seconds of one step; see the module for n, K, p, Q. `heads`: sequences that get a token."""
    total: float = line(decoding + prompt, model.dense_us) + model.host_us
    if heads:
        total += line(heads, model.head_us)
    if prompt:
        b = model.mixed_us
        total += b[0] + b[1] * prompt + b[2] * prompt_work + b[3] * decoding + b[4] * decode_context
    else:
        a = model.decode_us
        total += a[0] + a[1] * decoding + a[2] * decode_context
    return total * 1e-6


@compiled
def chunk_work(before: int, chunk: int) -> float:
    """What one chunk adds to Q."""
    return max(chunk, 256) * (before + 0.5 * chunk)


@dataclass(frozen=True, slots=True)
class Fit:
    """A model and how well it fits: relative errors of attention over the points used, by part."""

    model: StepTime
    errors: dict[str, dict[str, float]] = field(default_factory=dict)


def fit(folder: Path, layers: int = 32, most_tokens: int = 65_536, host_us: float = 0.0) -> Fit:
    """Fit the grid of a folder with attention.csv, dense.csv and per_sequence.csv (times of one layer).

    Args:
        folder: see vtoken.simulate.traces for what it comes from.
        layers: of the model.
        most_tokens: grid points with more tokens in memory are not used.
        host_us: see StepTime.
    """
    dense = _sum(folder / "dense.csv", "tokens", {**PER_LAYER, **dict.fromkeys(ONCE, 1 / layers)})
    head = _sum(folder / "per_sequence.csv", "sequences", {"lm_head": 1, "sampler": 1})
    grid = _grid(folder / "attention.csv", most_tokens)
    chunk, before, n, context, time_us = grid.T
    pure = chunk == 0
    one = np.ones(len(grid))
    work = np.maximum(chunk, TILE) * (before + 0.5 * chunk)
    a, decode_error = _relative_fit(np.stack([one, n, n * context])[:, pure].T, time_us[pure])
    b, mixed_error = _relative_fit(np.stack([one, chunk, work, n, n * context])[:, ~pure].T, time_us[~pure])
    model = StepTime(dense * np.array([[1], [layers]]), head, a * layers, b * layers, host_us)
    return Fit(model, {"decode": decode_error, "mixed": mixed_error})


def _sum(path: Path, key: str, weights: dict[str, float]) -> Floats:
    """[2, points]: points, and the weighted sum of the named parts' times at each."""
    times: dict[float, dict[str, float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            times.setdefault(float(row[key]), {})[row["layer"]] = float(row["time_us"])
    points = sorted(point for point, parts in times.items() if weights.keys() <= parts.keys())
    if len(points) < 2:
        raise ConfigError("data", str(path), f"times of {', '.join(weights)} at two or more points")
    return np.array([points, [sum(times[p][name] * w for name, w in weights.items()) for p in points]])


def _grid(path: Path, most_tokens: int) -> Floats:
    """[points, 5]: prefill_chunk, kv_prefill, n_decode, kv_decode, time_us."""
    grid = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    held = grid[:, 0] + grid[:, 1] + grid[:, 2] * grid[:, 3]
    return np.ascontiguousarray(grid[held <= most_tokens])


def _relative_fit(columns: Floats, time_us: Floats) -> tuple[Floats, dict[str, float]]:
    """Least squares of relative errors with coefficients of at least 0; the coefficients, and the errors in words."""
    scaled = columns / time_us[:, None]
    used = np.arange(columns.shape[1])
    while True:
        found, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(time_us)), rcond=None)
        if (found >= 0).all() or len(used) == 1:
            break
        used = np.delete(used, int(np.argmin(found)))
    coefficients = np.zeros(columns.shape[1])
    coefficients[used] = np.maximum(found, 0.0)
    error = np.abs(columns @ coefficients / time_us - 1.0)
    quantile = {f"p{q}": round(float(np.percentile(error, q)), 3) for q in (50, 90)}
    return coefficients, {"points": float(len(error)), "mean": round(float(error.mean()), 3), **quantile}
