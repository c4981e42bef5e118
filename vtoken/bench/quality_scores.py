"""What quality is measured in: perplexity beside that of the full cache, needle recall, ROUGE-L. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.bench.quality_texts import CHUNK_TOKENS

Surprises = list[npt.NDArray[np.float64]]
"""Per text, negative log-probability of each token that an evicted cache predicted, in nats."""

MONOTONE_TOLERANCE = 0.02
"""How far the perplexity may fall where fewer tokens are kept."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of one policy and ratio.

    Attributes:
        value: exp of the mean surprise.
        kept: share of the tokens that was live at the end.
        excess: mean surprise above that of the full cache on the same tokens, in nats.
        error: standard error of `excess`, over chunks.
    """

    value: float
    kept: float = 1.0
    excess: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Likeness:
    """Mean ROUGE-L of a policy's answers against the full cache's, and the share of their tokens that was kept."""

    rouge_l: float
    kept: float


def perplexity(found: Surprises, full: Surprises, kept: float = 1.0) -> Perplexity:
    """Of texts, beside the same texts under the full cache."""
    difference = np.concatenate([one - other for one, other in zip(found, full, strict=True)])
    chunks = [chunk.mean() for chunk in np.array_split(difference, max(len(difference) // CHUNK_TOKENS, 1))]
    error = float(np.std(chunks) / max(len(chunks) - 1, 1) ** 0.5)
    return Perplexity(float(np.exp(np.concatenate(found).mean())), kept, float(difference.mean()), error)


def falls(by_ratio: Mapping[float, float]) -> float:
    """The largest share by which the perplexity at some ratio lies below that at a higher ratio; 0 if nowhere."""
    highest, fall = 0.0, 0.0
    for ratio in sorted(by_ratio, reverse=True):
        highest = max(highest, by_ratio[ratio])
        fall = max(fall, 1 - by_ratio[ratio] / highest)
    return fall


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words; 1.0 for two texts of the same words."""
    words, expected = text.split(), reference.split()
    if not words or not expected:
        return float(words == expected)
    common = longest_common(words, expected)
    return 2 * common / (len(words) + len(expected))


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for index, other in enumerate(second, 1):
            above = row[index]
            row[index] = diagonal + 1 if word == other else max(above, row[index - 1])
            diagonal = above
    return row[-1]
