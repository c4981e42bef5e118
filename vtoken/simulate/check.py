"""`vtoken simulate --check`: what must hold before any other number of the simulator counts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from vtoken.device.table_kernels import CompiledKernels
from vtoken.simulate import calibration, frontier
from vtoken.simulate.agreement import engine_frontiers
from vtoken.simulate.steptime import Fit


def check(data: Path) -> tuple[dict[str, Any], bool]:
    """Both checks: what was found, and whether all of it holds."""
    step_time = calibration.grid(data)
    run, run_holds = measured_run(data, step_time)
    kernels, tables, engines, fits = CompiledKernels(), {}, {}, True
    for scene in frontier.SCENES:
        tables[scene.name] = frontier.frontiers(scene, kernels)
        engines[scene.name] = engine_frontiers(scene, step_time.model, kernels)
        fits &= frontier.holds(scene, tables[scene.name]) and frontier.holds(scene, engines[scene.name])
    capacity = {"token_tables": tables, "fleet_engine": engines, "holds": fits}
    return {"measured_run": run, "frontier": capacity}, run_holds and fits


def measured_run(data: Path, step_time: Fit) -> tuple[dict[str, Any], bool]:
    """The measured RTX 4090 run beside the simulated one."""
    real, ours = (asdict(one) for one in (calibration.measured(data), calibration.simulated(data, step_time)))
    error = {key: ours[key] / real[key] - 1.0 for key in real}
    holds = all(abs(error[key]) <= calibration.TOLERANCE for key in calibration.BAR)
    return {
        "measured": _rounded(real), "simulated": _rounded(ours), "error": _rounded(error),
        "grid_fit_error": step_time.errors, "calibrated": [], "holds": holds,
    }, holds  # fmt: skip


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in values.items()}
