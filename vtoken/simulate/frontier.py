"""How many requests a pool holds without a preemption, from the pure core's own block counts (`lockstep`).

engine               what `vtoken bench frontier` measured on the real engine: naive 5, lazy 8, eager 10
paper-35, paper-50   the paper's budgets: H100, Llama-3.1-8B, 16,320 tokens per request, half of them kept by random
                     choice, which leaves survivors everywhere: the hardest to pack. (The paper chose by H2O.)
paper-50-oldest      the oldest are forgotten: the easiest to pack
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.kernels import Kernels
from vtoken.core.table import NUMPY
from vtoken.simulate.lockstep import LockStep


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests of `prompt` tokens that grow to `total`, on `blocks` usable blocks.

    Attributes:
        around: by variant, about how many fit: where the search begins.
        needed: by variant, how many must fit.
    """

    name: str
    blocks: int
    prompt: int
    total: int
    options: PolicyOptions
    around: dict[str, int]
    needed: dict[str, int]


HALF = PolicyOptions("random", keep_ratio=0.5)
VARIANTS: dict[str, dict[str, Any]] = {
    "native": {"variant": "native"}, "naive": {"variant": "naive"}, "eager": {},
    "lazy": {"relocation": "lazy", "headroom_blocks": 8},
}  # fmt: skip
SCENES = (
    Scene("engine", 345, 16, 1016, PolicyOptions("random", budget_tokens=480),
          {"naive": 5, "lazy": 8, "eager": 10}, {"naive": 5, "lazy": 8, "eager": 10}),
    Scene("paper-35", 5426, 4320, 16320, HALF, {"native": 5, "naive": 5, "lazy": 8, "eager": 10},
          {"native": 5, "naive": 5, "lazy": 8, "eager": 10}),
    Scene("paper-50", 11518, 4320, 16320, HALF, {"native": 11, "naive": 11, "lazy": 17, "eager": 22},
          {"native": 11, "naive": 11, "eager": 22}),
    Scene("paper-50-oldest", 11518, 4320, 16320, PolicyOptions("streaming_llm", keep_ratio=0.5),
          {"lazy": 22}, {"lazy": 22}),
)  # fmt: skip
"""5 -> 8 is the paper's lazy design, 11 -> 22 the ideal packing, which hole filling reaches."""


def frontier(scene: Scene, variant: str, kernels: Kernels = NUMPY) -> int:
    """The largest number of requests that fit."""
    config = VTokenConfig.from_mapping({"policy": scene.options, **VARIANTS[variant]})

    def fits(count: int) -> bool:
        return count == 0 or LockStep(config, scene.blocks, count, scene.prompt, kernels=kernels).run(scene.total)

    count = scene.around[variant]
    if fits(count):
        while fits(count + 1):
            count += 1
        return count
    while not fits(count - 1):
        count -= 1
    return count - 1


def frontiers(scene: Scene, kernels: Kernels = NUMPY) -> dict[str, int]:
    """`frontier` of every variant that the scene names."""
    return {variant: frontier(scene, variant, kernels) for variant in scene.around}


def holds(scene: Scene, found: dict[str, int]) -> bool:
    """Whether what must fit does; without relocation neither more nor less."""
    return all(
        found[variant] == needed if variant in {"native", "naive"} else found[variant] >= needed
        for variant, needed in scene.needed.items()
    )
