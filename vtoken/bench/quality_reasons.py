"""Why policies rank as they do here: small experiments beside the tables of `vtoken bench quality`, at MIDDLE.

    question     changed                                                        looked at
    asked        forget behind the question instead of before it                needles found
    layers       scores from every layer instead of two                         perplexity, needles found
    recent       half of the budget is the newest tokens, as in H2O's paper     perplexity
    position     nothing: where kept tokens lie in the text, 0 oldest to 1      mean over one text
                 newest; all kept: 0.5

Nothing is judged by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from vtoken.bench.quality_engine import Case, QualityEngine
from vtoken.bench.quality_texts import Needle
from vtoken.core.config import MAX_SCORE_LAYERS

LOOKING = ("h2o", "scissorhands", "snapkv", "tova")
"""Policies by attention; fastgen is left out, for it does as h2o."""

EVERY_LAYER = {"score_layers": MAX_SCORE_LAYERS}
"""Engine settings for the experiment `layers`."""


@dataclass(frozen=True, slots=True)
class Changed(Case):
    """A case with options of its own, all in a prompt's prefill."""

    options: tuple[tuple[str, Any], ...] = ()

    def prefill(self) -> dict[str, Any]:
        """As a case's, and the options."""
        return {**self._options(between_chunks=True), **dict(self.options)}


@dataclass(slots=True)
class Reasons:
    """Results by experiment and policy."""

    asked: dict[str, int] = field(default_factory=dict)
    layers_perplexity: dict[str, float] = field(default_factory=dict)
    layers_needles: dict[str, int] = field(default_factory=dict)
    recent: dict[str, float] = field(default_factory=dict)
    position: dict[str, float] = field(default_factory=dict)


class Experiments:
    """Owner of the reasons; each method does one experiment on an engine."""

    def __init__(self, texts: Sequence[list[int]], needles: Sequence[Needle], ratio: float, console: Console) -> None:
        self.found = Reasons()
        self._texts, self._needles, self._ratio, self._log = texts, needles, ratio, console.log

    def asked(self, engine: QualityEngine, names: Sequence[str]) -> None:
        """The decision is made when the whole prompt is computed, so its last window holds the question."""
        behind = (("between_chunks", False),)
        for name in names:
            self.found.asked[name] = sum(engine.recall(self._needles, Changed(name, self._ratio, behind)))
            self._log(f"asked before it forgets, {name}: {self.found.asked[name]} of {len(self._needles)}")

    def layers(self, engine: QualityEngine) -> None:
        """On an engine that looks at all layers."""
        for name in LOOKING:
            case = Case(name, self._ratio)
            self.found.layers_perplexity[name] = self._perplexity(engine, case)
            self.found.layers_needles[name] = sum(engine.recall(self._needles, case))
            self._log(f"all layers, {name}: {self.found.layers_perplexity[name]}, {self.found.layers_needles[name]}")

    def recent(self, engine: QualityEngine) -> None:
        """Half of what is kept of a whole text is its newest tokens; shorter beginnings of it keep more than their
        share, so the two that don't look are asked in the same way, for comparison.
        """
        newest = (("protect_recent", round(self._ratio * len(self._texts[0]) / 2)),)
        for name in (*LOOKING, "streaming_llm", "random"):
            self.found.recent[name] = self._perplexity(engine, Changed(name, self._ratio, newest))
            self._log(f"half of the budget recent, {name}: {self.found.recent[name]}")

    def position(self, engine: QualityEngine, names: Sequence[str]) -> None:
        """Of one text."""
        for name in names:
            engine.read(self._texts[0], Case(name, self._ratio), 1)
            self.found.position[name] = round(float(np.mean(engine.live)) / len(self._texts[0]), 3)
        self._log(f"mean position of kept tokens: {self.found.position}")

    def _perplexity(self, engine: QualityEngine, case: Case) -> float:
        surprises = np.concatenate(engine.surprises(self._texts, case))
        return round(float(np.exp(surprises.mean())), 3)
