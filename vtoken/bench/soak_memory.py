"""How much memory a soak's processes hold, over its steps, and whether that grows.

Only private memory counts: pages of libraries come and go with what else the machine does. The engine's private
memory climbs while allocators and caches settle and then swings with what runs, so its trend is judged, not two
single moments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil

WARM_UP = 0.25
"""Share of the samples that is left out, at the beginning."""


@dataclass(slots=True)
class Memory:
    """Samples of this process (the scheduler and the traffic) and of its children (the worker), MiB.

    Attributes:
        samples: (step, this process, children) in the order taken.
    """

    samples: list[tuple[int, float, float]] = field(default_factory=list)

    def sample(self, step: int) -> None:
        """Note what is held now."""
        this = psutil.Process()
        children = this.children(recursive=True)
        self.samples.append((step, _private_mib([this]), _private_mib(children)))

    @property
    def growth_mib(self) -> float:
        """Both together: median of the last third minus median of the first third, after the warm-up."""
        settled = [own + others for _, own, others in self.samples[int(WARM_UP * len(self.samples)) :]]
        third = max(1, len(settled) // 3)
        return median(settled[-third:]) - median(settled[:third])

    def rows(self, mode: str) -> list[dict[str, Any]]:
        """For the file of samples."""
        return [
            {"mode": mode, "step": step, "scheduler_mib": round(own, 2), "worker_mib": round(others, 2)}
            for step, own, others in self.samples
        ]


def _private_mib(processes: list[psutil.Process]) -> float:
    """Resident pages that are not of a file and not shared."""
    held = [process.memory_info() for process in processes]
    return float(sum(memory.rss - memory.shared for memory in held)) / 2**20
