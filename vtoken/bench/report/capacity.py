"""Figures on memory: what is trapped, what is returned, what that serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vtoken.bench.report.figure import Figure, Inputs, Row, bars, by, lines

SLOT_ORDER = ("native", "naive", "lazy", "eager")
"""Variants as they are drawn."""


# ---- figures 1 and 7 ------------------------------------------------------------------------------------------------


def waste_rows(inputs: Inputs) -> list[Row]:
    """Per workload, policy and variant: F, share of blocks at most half full, blocks per request."""
    return [
        {"workload": workload, "policy": policy, "variant": variant, **measured}
        for workload, policies in inputs.values("waste").items() if isinstance(policies, Mapping)
        for policy, variants in policies.items()
        for variant, measured in variants.items()
    ]  # fmt: skip


def trapped_rows(inputs: Inputs) -> list[Row]:
    """Figure 1: naive only."""
    keys = ("workload", "policy", "waste", "half_empty_share")
    return [{key: row[key] for key in keys} for row in waste_rows(inputs) if row["variant"] == "naive"]


def draw_trapped(canvas: Any, rows: Sequence[Row]) -> None:
    """F and the share of blocks that are at most half full."""
    left, right = canvas.subplots(1, 2)
    for axes, key, label in ((left, "waste", "F"), (right, "half_empty_share", "blocks at most half full, share")):
        bars(axes, rows, "policy", key, "workload")
        axes.set(ylabel=label, ylim=(0, 1))


def returned_rows(inputs: Inputs) -> list[Row]:
    """Figure 7: utilisation and blocks per request, every variant."""
    return [
        {
            "workload": row["workload"], "policy": row["policy"], "variant": row["variant"],
            "utilisation": 1 - row["waste"], "blocks_per_request": row["blocks_per_request"],
            "moves_per_freed_block": row.get("moves_per_freed_block"),
        }
        for row in waste_rows(inputs)
    ]  # fmt: skip


def draw_returned(canvas: Any, rows: Sequence[Row]) -> None:
    """One workload: the first."""
    first = [row for row in rows if row["workload"] == rows[0]["workload"]]
    left, right = canvas.subplots(1, 2)
    bars(left, first, "policy", "utilisation", "variant")
    left.set(ylabel="mean utilisation of held blocks", ylim=(0, 1))
    bars(right, first, "policy", "blocks_per_request", "variant")
    right.set(ylabel="blocks held per request")


# ---- figure 8 -------------------------------------------------------------------------------------------------------


def sla_rows(inputs: Inputs) -> list[Row]:
    """Throughput and 95th percentile by concurrency and variant."""
    return list(inputs.values("sla").get("sweep", []))


def draw_sla(canvas: Any, rows: Sequence[Row]) -> None:
    """Both over concurrency."""
    left, right = canvas.subplots(1, 2)
    lines(left, rows, "concurrency", "tokens_per_s", "variant")
    left.set(xlabel="concurrency", ylabel="tokens per second")
    lines(right, rows, "concurrency", "p95_s", "variant")
    right.set(xlabel="concurrency", ylabel="95th percentile of latency, s")


# ---- figures 9 and 10 -----------------------------------------------------------------------------------------------


def frontier_rows(inputs: Inputs) -> list[Row]:
    """Figure 9: the largest concurrency without a preemption."""
    return [
        {"scene": scene, "blocks": found["blocks"], "variant": variant, "requests": found[variant]}
        for scene, found in inputs.values("frontier").items()
        for variant in SLOT_ORDER if variant in found
    ]  # fmt: skip


def draw_frontier(canvas: Any, rows: Sequence[Row]) -> None:
    """Bars by scene."""
    axes = canvas.subplots()
    shown = [{**row, "scene": str(row["scene"]).replace(", ", "\n")} for row in rows]
    bars(axes, shown, "scene", "requests", "variant")
    axes.tick_params(axis="x", labelrotation=0, labelsize="x-small")
    axes.set(ylabel="requests without a preemption")


def demand_rows(inputs: Inputs) -> list[Row]:
    """Figure 10: most blocks in use by concurrency, from the trials."""
    return [
        {
            "scene": row["scene"], "variant": row["variant"], "concurrency": int(row["concurrency"]),
            "peak_blocks": int(row["peak_blocks"]), "blocks": int(row["blocks"]),
            "preemptions": int(row["preemptions"]), "tokens_per_s": float(row["tokens_per_s"]),
        }
        for row in inputs.samples("frontier")
    ]  # fmt: skip


def draw_demand(canvas: Any, rows: Sequence[Row]) -> None:
    """The scene with most variants: blocks, and throughput, over concurrency."""
    scenes = by(rows, "scene")
    chosen = max(scenes.values(), key=lambda members: len(by(members, "variant")))
    left, right = canvas.subplots(1, 2)
    lines(left, chosen, "concurrency", "peak_blocks", "variant")
    left.axhline(chosen[0]["blocks"], linestyle=":", color="grey")
    preempted = [row for row in chosen if row["preemptions"]]
    left.plot(
        [row["concurrency"] for row in preempted], [row["peak_blocks"] for row in preempted], "x", color="black"
    )  # fmt: skip
    left.set(xlabel="concurrency", ylabel="most blocks in use (x: preempted)")
    lines(right, chosen, "concurrency", "tokens_per_s", "variant")
    right.set(xlabel="concurrency", ylabel="tokens per second")


# ---- prefix caching -------------------------------------------------------------------------------------------------


def prefix_rows(inputs: Inputs) -> list[Row]:
    """Hits and blocks by how many share a beginning."""
    return [
        {"sharing": sharing, "variant": variant, **measured}
        for sharing, runs in inputs.values("prefix").items() if isinstance(runs, Mapping)
        for variant, measured in runs.items()
    ]  # fmt: skip


def draw_prefix(canvas: Any, rows: Sequence[Row]) -> None:
    """Hit rate of all, and blocks."""
    left, right = canvas.subplots(1, 2)
    for axes, key, label in ((left, "hit_rate", "hit rate"), (right, "blocks", "blocks in use")):
        bars(axes, rows, "sharing", key, "variant")
        axes.set(xlabel="requests per beginning", ylabel=label)


# ---- sensitivity ----------------------------------------------------------------------------------------------------


def sensitivity_rows(inputs: Inputs) -> list[Row]:
    """The points of every surface."""
    return list(inputs.values("simulate-sensitivity").get("points", []))


def draw_sensitivity(canvas: Any, rows: Sequence[Row]) -> None:
    """F as a surface over theta_F and the share kept; over block size, interval and headroom as lines."""
    first, *places = canvas.subplots(2, 2).flat
    surfaces = by(rows, "surface")
    _surface(canvas, first, surfaces.pop("theta_f"))
    for axes, (surface, members) in zip(places, surfaces.items(), strict=True):
        lines(axes, members, surface, "waste", SERIES[surface])
        axes.set(xlabel=f"{surface} (lines: {SERIES[surface]})", ylabel="mean F")
        axes.xaxis.label.set_size("small")


def _surface(canvas: Any, axes: Any, rows: Sequence[Row]) -> None:
    """Dark where little is wasted; the default `theta_f` is marked."""
    waste = {(row["theta_f"], row["keep_ratio"]): row["waste"] for row in rows}
    thetas, ratios = (sorted({key[place] for key in waste}) for place in (0, 1))
    grid = [[waste[theta, ratio] for theta in thetas] for ratio in ratios]
    colours = axes.pcolormesh(thetas, ratios, grid, shading="nearest")
    canvas.colorbar(colours, ax=axes, label="mean F")
    axes.axvline(0.25, linestyle=":", color="white")
    axes.set(xlabel="theta_f (dotted: default)", ylabel="share kept")
    axes.xaxis.label.set_size("small")


SERIES = {"block_size": "relocation", "interval_tokens": "relocation", "headroom_blocks": "requests"}
"""By what is varied along x: what is varied from line to line."""


FIGURES = (
    Figure(
        "fig-01-trapped", "Fig. 1: what is trapped",
        "F 0.40 to 0.60; 56 to 67 % of the blocks at most half full.",
        "Evictions that are only hidden (naive), by policy and workload; means over steps after the first eviction.",
        "waste", trapped_rows, draw_trapped,
    ),
    Figure(
        "fig-07-returned", "Fig. 7: what is returned",
        "Mean utilisation +21.9 %; retained blocks per request -27.2 to -72.3 %.",
        "The same evictions: hidden (naive), moved later (lazy, the paper's design), moved at once (eager, ours).",
        "waste", returned_rows, draw_returned,
    ),
    Figure(
        "fig-08-sla", "Fig. 8: throughput under a service level",
        "Best feasible throughput +9.9 to +37.3 %, up to +103.7 %.",
        "Closed loops of C clients; the service level is 1.05 x naive's 95th percentile at C = 8.",
        "sla", sla_rows, draw_sla,
    ),
    Figure(
        "fig-09-frontier", "Fig. 9: the capacity frontier",
        "5 -> 8 and 11 -> 22 requests at two block budgets.",
        "The largest concurrency without a preemption at a fixed block budget; preemptions are counted.",
        "frontier", frontier_rows, draw_frontier,
    ),
    Figure(
        "fig-10-demand", "Fig. 10: demand for blocks",
        "5 -> 8 and 11 -> 22 requests at two block budgets.",
        "The trials of the capacity frontier: most blocks in use, and throughput, by concurrency. Dotted: the pool.",
        "frontier", demand_rows, draw_demand,
    ),
    Figure(
        "prefix", "Prefix caching",
        "Retained blocks -28.6 to -42.2 %; shared blocks are skipped.",
        "Groups of requests with a common beginning, half of the tokens forgotten by `random`; blocks count once.",
        "prefix", prefix_rows, draw_prefix,
    ),
    Figure(
        "sensitivity", "Sensitivity",
        "Flat near theta_F = 0.25.",
        "The pure core on a counted pool, no engine: requests that grow in step under `random`.",
        "simulate-sensitivity", sensitivity_rows, draw_sensitivity,
    ),
)  # fmt: skip
