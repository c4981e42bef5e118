"""`vtoken simulate --check`: what must hold before any other number of the simulator counts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from vtoken.device.table_kernels import CompiledKernels
from vtoken.simulate import calibration, frontier


def check(data: Path) -> tuple[dict[str, Any], bool]:
    """Both checks: what was found, and whether all of it holds."""
    run, run_holds = measured_run(data)
    found, fits = {}, True
    for scene in frontier.SCENES:
        found[scene.name] = frontier.frontiers(scene, CompiledKernels())
        fits &= frontier.holds(scene, found[scene.name])
    return {"measured_run": run, "frontier": found, "frontier_holds": fits}, run_holds and fits


def measured_run(data: Path) -> tuple[dict[str, Any], bool]:
    """The measured RTX 4090 run beside the simulated one."""
    step_time = calibration.grid(data)
    real, ours = (asdict(one) for one in (calibration.measured(data), calibration.simulated(data, step_time)))
    error = {key: ours[key] / real[key] - 1.0 for key in real}
    holds = all(abs(error[key]) <= calibration.TOLERANCE for key in calibration.BAR)
    return {
        "measured": _rounded(real), "simulated": _rounded(ours), "error": _rounded(error),
        "grid_fit_error": step_time.errors, "calibrated": [], "holds": holds,
    }, holds  # fmt: skip


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in values.items()}
