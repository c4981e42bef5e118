"""Figures on what reclamation costs, and on what forgetting costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vtoken.bench.report.figure import Figure, Inputs, Row, bars, by, interval, lines
from vtoken.bench.tables.quality import FULL, by_policy

# ---- figure 11 ------------------------------------------------------------------------------------------------------


def idle_rows(inputs: Inputs) -> list[Row]:
    """Ratios over unmodified vLLM by concurrency, and what was measured beside them."""
    values = inputs.values("idle")
    found: list[Row] = []
    for concurrency, one in values.items():
        if "substrate_share" not in one:
            continue
        measured = {"CPU seconds": one["cpu_per_token_over_native"], "wall-clock": one["wall_per_token_over_native"]}
        for key, what in BESIDE.items():
            if concurrency in values.get(key, {}):
                measured[what] = values[key][concurrency]
        found += [
            {
                "concurrency": int(concurrency), "measure": what, **interval(ratio, "ratio"),
                "substrate_share": one["substrate_share"],
            }
            for what, ratio in measured.items()
        ]  # fmt: skip
    return found


BESIDE = {
    "connector": "an empty connector, CPU seconds", "control": "control: unmodified, CPU seconds",
}  # fmt: skip
"""What else the benchmark compares with unmodified vLLM."""


def draw_idle(canvas: Any, rows: Sequence[Row]) -> None:
    """Per cent over unmodified vLLM."""
    axes = canvas.subplots()
    shown = [{**row, **{key: _percent(row[key]) for key in ("ratio", "ratio_low", "ratio_high")}} for row in rows]
    bars(axes, shown, "concurrency", "ratio", "measure")
    axes.axhline(1.0, linestyle=":", color="grey")
    axes.set(xlabel="concurrency", ylabel="more than unmodified vLLM, %")


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * (ratio - 1)


# ---- bookkeeping ----------------------------------------------------------------------------------------------------


def bookkeeping_rows(inputs: Inputs) -> list[Row]:
    """Microseconds per step by tracked requests and policy."""
    return [
        {"policy": policy, "part": part, "requests": int(count), "us": us}
        for policy, one in inputs.values("bookkeeping").items() if isinstance(one, Mapping)
        for part, key in (("bar", "decision_us_by_tracked"), ("whole", "whole_decision_us_by_tracked"))
        for count, us in one.get(key, {}).items()
    ]  # fmt: skip


def draw_bookkeeping(canvas: Any, rows: Sequence[Row]) -> None:
    """Both axes logarithmic."""
    axes = canvas.subplots()
    lines(axes, [{**row, "line": f"{row['policy']}, {row['part']}"} for row in rows], "requests", "us", "line")
    axes.axhline(1000, linestyle=":", color="grey")
    axes.set(xscale="log", yscale="log", xlabel="requests of 4,096 tokens", ylabel="microseconds per step")


# ---- speed ----------------------------------------------------------------------------------------------------------


def speed_rows(inputs: Inputs) -> list[Row]:
    """Tokens per CPU second over unmodified vLLM by context and policy."""
    return [
        {"context": int(context), "policy": policy, **interval(one["whole"], "ratio")}
        for context, policies in inputs.values("speed").items() if isinstance(policies, Mapping)
        for policy, one in policies.items()
    ]  # fmt: skip


def draw_speed(canvas: Any, rows: Sequence[Row]) -> None:
    """Above 1 forgetting pays."""
    axes = canvas.subplots()
    lines(axes, rows, "context", "ratio", "policy")
    axes.axhline(1.0, linestyle=":", color="grey")
    axes.set(xlabel="context, tokens", ylabel="tokens per CPU second over vLLM")


# ---- quality --------------------------------------------------------------------------------------------------------


def quality_rows(inputs: Inputs) -> list[Row]:
    """Perplexity and needles by policy and share kept; 1.0 is the full cache."""
    values = inputs.values("quality")
    found: list[Row] = []
    for name, cases in values.items():
        measure = "needles found" if name == "needles_found" else name.replace("_", " ")
        if name != "needles_found" and not name.startswith("perplexity_"):
            continue
        for policy, by_share in by_policy(cases).items():
            shares = {1.0: cases.get(FULL), **{float(share): value for share, value in by_share.items()}}
            found += [
                {"measure": measure, "policy": policy, "kept": share, "value": value}
                for share, value in shares.items() if value is not None
            ]  # fmt: skip
    return found


def draw_quality(canvas: Any, rows: Sequence[Row]) -> None:
    """One part per measure."""
    measures = by(rows, "measure")
    places = canvas.subplots(1, len(measures), squeeze=False)[0]
    for axes, (measure, members) in zip(places, measures.items(), strict=True):
        lines(axes, members, "kept", "value", "policy")
        axes.set(xlabel="share of tokens kept", ylabel=measure)


FIGURES = (
    Figure(
        "fig-11-idle", "Fig. 11: what it costs",
        "Pure indirection below 1.0 %.",
        "The plugin without a policy and unmodified vLLM in one process with the same weights, step by step in turn.",
        "idle", idle_rows, draw_idle,
    ),
    Figure(
        "cpu-cost", "CPU cost of bookkeeping",
        "Not reported.",
        "Real tables, policies, planners; a scheduler in miniature. Bar: evict, plan, apply; whole: and scan, choice.",
        "bookkeeping", bookkeeping_rows, draw_bookkeeping,
    ),
    Figure(
        "quality", "Quality by policy and share kept",
        "ROUGE-L of vtoken and naive -0.0016 apart.",
        "Prompts in chunks, evicted after each; naive and vtoken are identical, so the curves are the policies'.",
        "quality", quality_rows, draw_quality,
    ),
    Figure(
        "crossover", "Crossover: where forgetting pays without memory pressure",
        "Not reported.",
        "Decoding with ample memory and half of the tokens kept, beside unmodified vLLM. Below 1 it does not pay.",
        "speed", speed_rows, draw_speed,
    ),
)  # fmt: skip
