"""Results of quality measurements as tables, and as rows of one CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from vtoken.bench.quality_engine import FULL_CACHE, Case
from vtoken.bench.quality_scores import Likeness, Perplexity

Perplexities = Mapping[int, Mapping[Case, Perplexity]]
Recalls = Mapping[Case, Sequence[bool]]
Likenesses = Mapping[Case, Likeness]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the CSV.

    Attributes:
        measure: perplexity, needle_recall or rouge_l. tokens: length of the texts; 0 where they differ.
        value: of the measure. kept: share that was kept, where it was looked at.
        excess_nats, error_nats: of a perplexity, see Perplexity.
    """

    measure: str
    policy: str
    keep_ratio: float
    tokens: int
    value: float
    kept: float | None = None
    excess_nats: float = 0.0
    error_nats: float = 0.0


def rows(perplexities: Perplexities, recalls: Recalls, likenesses: Likenesses) -> list[Row]:
    """Everything, in the order in which it was measured."""
    found = [
        Row("perplexity", case.policy, case.ratio, tokens, one.value, one.kept, one.excess, one.error)
        for tokens, by_case in perplexities.items()
        for case, one in by_case.items()
    ]
    found += [Row("needle_recall", c.policy, c.ratio, 0, sum(hits) / len(hits)) for c, hits in recalls.items()]
    return found + [Row("rouge_l", c.policy, c.ratio, 0, one.rouge_l, one.kept) for c, one in likenesses.items()]


def values(perplexities: Perplexities, recalls: Recalls, likenesses: Likenesses) -> dict[str, Any]:
    """For the line of JSON."""
    return {
        **{
            f"perplexity_{tokens}": {str(case): round(one.value, 3) for case, one in by_case.items()}
            for tokens, by_case in perplexities.items()
        },
        "needles_found": {str(case): sum(hits) for case, hits in recalls.items()},
        "needles": max((len(hits) for hits in recalls.values()), default=0),
        "rouge_l": {str(case): round(one.rouge_l, 3) for case, one in likenesses.items()},
    }


def tables(perplexities: Perplexities, recalls: Recalls, likenesses: Likenesses) -> list[Table]:
    """One table per text length; recall and ROUGE-L in one more."""
    made = []
    for tokens, by_case in perplexities.items():
        title = f"perplexity, texts of {tokens:,} tokens (in brackets: nats above the full cache)"
        cells = {case: _shown(one) for case, one in by_case.items()}
        made.append(_table(title, cells))
    recall = {case: f"{sum(hits)} of {len(hits)}" for case, hits in recalls.items()}
    made.append(_table("needles found", recall))
    likeness = {case: f"{one.rouge_l:.3f} ({one.kept:.2f})" for case, one in likenesses.items()}
    made.append(_table("ROUGE-L against the full cache's answers (share of tokens kept)", likeness))
    return made


def _shown(one: Perplexity) -> str:
    return f"{one.value:.2f} ({one.excess:+.3f} ± {one.error:.3f})" if one.error else f"{one.value:.2f}"


def _table(title: str, cells: Mapping[Case, str]) -> Table:
    """Policies down, ratios across, the full cache's ratio first."""
    table = Table(title=title)
    table.add_column("policy")
    ratios = sorted({case.ratio for case in cells}, reverse=True)
    for ratio in ratios:
        table.add_column("all kept" if ratio == FULL_CACHE.ratio else f"{ratio:g} kept", justify="right")
    for policy in dict.fromkeys(case.policy for case in cells):
        table.add_row(policy, *(cells.get(Case(policy, ratio), "") for ratio in ratios))
    return table
