"""The engines of the fleet against the pure core: the same frontiers, from compiled steps instead of token tables.

A fleet's engine knows a request's blocks by a formula or a table (`forgetting`, `spread`). Here it serves the scenes of
`frontier`, and preemptions are counted.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.config import Variant, VTokenConfig
from vtoken.core.kernels import Kernels
from vtoken.core.table import NUMPY
from vtoken.simulate.frontier import VARIANTS, Scene
from vtoken.simulate.replicas import Replicas
from vtoken.simulate.spread import SMALLEST_PROMPT, spread_table
from vtoken.simulate.state import EngineShape
from vtoken.simulate.steptime import StepTime
from vtoken.simulate.workload import workload

BATCH = 1 << 20
"""Every prompt in one step: the requests then grow in step."""


def engine_frontiers(scene: Scene, step_time: StepTime, kernels: Kernels = NUMPY) -> dict[str, int]:
    """The largest number of requests without a preemption, by variant."""
    found = {}
    for variant, begin in scene.around.items():
        shape, count = _shape(scene, variant, step_time, kernels), begin
        if _fits(scene, shape, count):
            while _fits(scene, shape, count + 1):
                count += 1
        else:
            while count and not _fits(scene, shape, count):
                count -= 1
        found[variant] = count
    return found


def _shape(scene: Scene, variant: str, step_time: StepTime, kernels: Kernels) -> EngineShape:
    config = VTokenConfig.from_mapping({"policy": scene.options, **VARIANTS[variant]})
    spread = None
    if variant not in {Variant.NATIVE, "eager"}:
        rows = int(np.log2(scene.prompt / SMALLEST_PROMPT)) + 1
        intervals = -(-(scene.total - scene.prompt) // scene.options.interval_tokens)
        spread = spread_table(config, prompts=rows, intervals=intervals, kernels=kernels, only=rows - 1)
    return EngineShape(scene.blocks, step_time, 16, BATCH, 64, caching=False, config=config, spread=spread)


def _fits(scene: Scene, shape: EngineShape, count: int) -> bool:
    prompts, outputs = np.full(count, scene.prompt), np.full(count, scene.total - scene.prompt)
    engine = Replicas(workload(scene.name, np.zeros(count), prompts, outputs), shape)
    for request in range(count):
        engine.send(request, 0, 0.0)
    while engine.busy() and not engine.state.lines["preemptions"][0]:
        engine.advance(engine.now_s + 10.0)
    return not engine.state.lines["preemptions"][0]
