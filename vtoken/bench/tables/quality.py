"""Tables of quality: perplexity, needles and likeness by policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vtoken.bench.tables.cells import absent, code, dig, number, table_of, values_of
from vtoken.results.pages import Results

FULL = "none"


def by_policy(cases: Mapping[str, float] | None) -> dict[str, dict[str, float]]:
    """Policy -> share kept -> value, from `POLICY at SHARE`; the full cache, which has no share, is left out."""
    found: dict[str, dict[str, float]] = {}
    for case, value in (cases or {}).items():
        policy, at, share = case.partition(" at ")
        if at:
            found.setdefault(policy, {})[share] = value
    return found


def perplexity(results: Results) -> str:
    """By policy and share kept, beside the experiments at one half; one table per text length."""
    values = values_of(results, "quality")
    lengths = [name for name in values if name.startswith("perplexity_")]
    if not lengths:
        return absent("quality")
    return "\n".join(_perplexity(results, values, name) for name in lengths)


def _perplexity(results: Results, values: Mapping[str, Any], name: str) -> str:
    found = by_policy(values[name])
    shares = sorted({share for one in found.values() for share in one}, reverse=True)
    middle = "0.5" if "0.5" in shares else shares[0]
    reasons = values.get("reasons") or {}
    experiments = {key: head for key, head in EXPERIMENTS.items() if reasons.get(key)}
    rows = [
        [
            code(policy), *(number(one[share], 2) if share in one else "" for share in shares),
            *(number(reasons[key][policy], 2) if policy in reasons[key] else "" for key in experiments),
        ]
        for policy, one in sorted(found.items(), key=lambda item: item[1].get(middle, 0.0))
    ]  # fmt: skip
    full = number(dig(values, name, FULL), 2)
    head = [f"texts of {int(name.split('_')[1]):,} tokens; full cache {full}", *shares, *experiments.values()]
    return table_of(results, "quality", head, rows)


EXPERIMENTS = {"recent": "recent", "layers_perplexity": "all layers", "position": "position"}
"""Columns of `quality_reasons`, where the experiment was done."""


def needles(results: Results) -> str:
    """Needles found at one half, before and after the question is read."""
    values = values_of(results, "quality")
    found, after = by_policy(values.get("needles_found")), dig(values, "reasons", "asked") or {}
    count = values.get("needles", 0)
    shares = sorted({share for one in found.values() for share in one}, reverse=True)
    rows = [
        [code(policy), *(str(one.get(share, "")) for share in shares), str(after.get(policy, ""))]
        for policy, one in sorted(found.items(), key=lambda item: -item[1].get("0.5", 0))
    ]
    full = dig(values, "needles_found", FULL)
    rows.insert(0, ["full cache", *[str(full)] * (len(shares) + bool(after))])
    head = [f"needles found, of {count}", *(f"{share} kept, before the question" for share in shares)]
    return table_of(results, "quality", [*head, "0.5 kept, after it"], rows)


def needle_sets(results: Results) -> str:
    """Needles found, and what was kept of them, by score and by who shares a choice."""
    values = values_of(results, "needles")
    found, kept, asked = values.get("found") or {}, values.get("needle_kept") or {}, values.get("needles", 0)
    rows = [[name, str(count), number(kept.get(name), 2)] for name, count in found.items()]
    head = ["score, shared by, share kept", f"needles found, of {asked}", "of the needles' tokens kept"]
    return table_of(results, "needles", head, rows) if rows else absent("needles")


def likeness(results: Results) -> str:
    """ROUGE-L of chat answers against the full cache's."""
    found = by_policy(values_of(results, "quality").get("rouge_l"))
    rows = [[code(policy), number(one.get("0.5"), 3)] for policy, one in found.items()]
    if not rows:
        return "*Not in the result file: `vtoken bench quality` measures it.*\n"
    return table_of(results, "quality", ["policy", "ROUGE-L of answers, 0.5 kept"], rows)
