"""Figures on fleets: the simulator beside a measured run, and the routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vtoken.bench.report.figure import Figure, Inputs, Row, bars

MEASURED = ("makespan_s", "kv_use", "peak_running", "output_tokens_per_s")


def calibration_rows(inputs: Inputs) -> list[Row]:
    """The measured run and the simulated one."""
    run = inputs.values("simulate-check").get("measured_run", {})
    return [
        {"measure": key, **{side: run[side][key] for side in ("measured", "simulated", "error")}}
        for key in MEASURED if key in run.get("measured", {})
    ]  # fmt: skip


def draw_calibration(canvas: Any, rows: Sequence[Row]) -> None:
    """Errors in per cent."""
    axes = canvas.subplots()
    axes.bar([row["measure"] for row in rows], [100 * row["error"] for row in rows])
    for bar in (-10, 10):
        axes.axhline(bar, linestyle=":", color="grey")
    axes.set(ylabel="simulated over measured, %")


def router_rows(inputs: Inputs) -> list[Row]:
    """Our router beside the best other one, by case."""
    return [
        {"case": f"{one['case']} ({one['replicas']})", "beside": beside, "ratio": one[key]}
        for one in inputs.values("simulate-study").get("verdicts", [])
        for beside, key in (
            ("best other", "over_best"), ("round robin", "over_round_robin"),
            ("best other behind our gate", "over_best_gated"),
        )
    ]  # fmt: skip


def draw_routers(canvas: Any, rows: Sequence[Row]) -> None:
    """Ratios of goodput."""
    axes = canvas.subplots()
    bars(axes, rows, "case", "ratio", "beside")
    axes.axhline(1.0, linestyle=":", color="grey")
    axes.tick_params(axis="x", labelrotation=60, labelsize="x-small")
    axes.set(ylabel="goodput of our gate and router over")


FIGURES = (
    Figure(
        "calibration", "The simulator beside a measured run", "",
        "300 ShareGPT requests on one RTX 4090; nothing is fitted to the run. Dotted: the bar of 10 %.",
        "simulate-check", calibration_rows, draw_calibration,
    ),
    Figure(
        "routers", "Routers on simulated fleets", "",
        "Goodput under a service level, one run of one seed per case; replicas in brackets.",
        "simulate-study", router_rows, draw_routers,
    ),
)  # fmt: skip
