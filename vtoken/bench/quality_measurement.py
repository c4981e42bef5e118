"""What `vtoken bench quality` measures, piece by piece, each kept as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from rich.console import Console

from vtoken.bench.quality_engine import FULL_CACHE, Case, QualityEngine
from vtoken.bench.quality_reasons import Experiments, Reasons
from vtoken.bench.quality_scores import Likeness, Perplexity, perplexity, rouge_l
from vtoken.bench.quality_texts import Texts
from vtoken.core.policies import policy_names
from vtoken.results.journal import Journal

MIDDLE = 0.5
"""The ratio at which policies are compared with each other."""

FEW = ("streaming_llm", "random", "snapkv")
"""One that keeps a window, one that keeps anything, one that looks: for the measures that take long."""

NOISE = 1e-3
"""Largest relative difference of a perplexity between the strict reader and the engine's own kernel."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a run.

    Attributes:
        ratios: shares kept, for the perplexity of every policy.
        texts, text_tokens: passages for perplexity.
        long_texts, long_tokens: longer ones, for FEW.
        needles, needle_tokens: how many, and the shortest and the longest haystack.
        needle_ratios: for FEW, besides MIDDLE.
        chats, chat_tokens: answers, and tokens in each.
        all_policies: or FEW, where perplexity is not what is measured.
        reasons: also do the experiments of quality_reasons.
    """

    ratios: tuple[float, ...]
    texts: int
    text_tokens: int
    long_texts: int
    long_tokens: int
    needles: int
    needle_tokens: tuple[int, int]
    needle_ratios: tuple[float, ...]
    chats: int
    chat_tokens: int
    all_policies: bool
    reasons: bool


@dataclass(slots=True)
class Results:
    """Everything that was measured, by case; perplexities also by text length in tokens."""

    perplexity: dict[int, dict[Case, Perplexity]] = field(default_factory=dict)
    recall: dict[Case, list[bool]] = field(default_factory=dict)
    likeness: dict[Case, Likeness] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    reasons: Reasons = field(default_factory=Reasons)
    faults: list[str] = field(default_factory=list)


Start = Callable[[], QualityEngine]
"""The engine, started when it is first asked for."""


class Measurement:
    """Owner of the results; each method measures one thing on an engine, piece by piece."""

    def __init__(self, texts: Texts, scale: Scale, console: Console, journal: Journal) -> None:
        self.results = Results()
        self._scale, self._log, self._journal = scale, console.log, journal
        self._names = [name for name in policy_names() if name != FULL_CACHE.policy]
        self._chosen = self._names if scale.all_policies else FEW
        self._passages = texts.passages(scale.texts, scale.text_tokens)
        self._long = texts.passages(scale.long_texts, scale.long_tokens)
        self._needles = texts.needles(scale.needles, *scale.needle_tokens)
        self._chats = texts.chats(scale.chats)
        self._experiments = Experiments(self._passages, self._needles, MIDDLE, console)
        self.results.reasons = self._experiments.found

    @property
    def pieces(self) -> int:
        """How many there are."""
        scale, few = self._scale, len(FEW)
        perplexities = 1 + len(self._names) * len(scale.ratios) + bool(self._long) * (1 + few * len(self._low))
        recalls = 1 + len(self._chosen) + few * len(scale.needle_ratios)
        return 3 + perplexities + recalls + len(self._chosen) + 4 * scale.reasons

    @property
    def _low(self) -> list[float]:
        return [ratio for ratio in self._scale.ratios if ratio <= MIDDLE]

    def perplexities(self, engine: Start) -> None:
        """Every policy at every ratio; on long texts FEW, at the lower ratios."""
        scale = self._scale
        cases = [Case(name, ratio) for name in self._names for ratio in scale.ratios]
        self._perplexity(engine, self._passages, cases)
        if self._long:
            self._perplexity(engine, self._long, [Case(name, ratio) for name in FEW for ratio in self._low])

    def _perplexity(self, engine: Start, texts: Sequence[list[int]], cases: Sequence[Case]) -> None:
        full = cache(lambda: engine().surprises(texts, FULL_CACHE))

        def measure(case: Case) -> Perplexity:
            surprises = full() if case == FULL_CACHE else engine().surprises(texts, case)
            kept = engine().kept  # of this case: `full` may still have to be computed
            return perplexity(surprises, full(), kept)

        found = self.results.perplexity.setdefault(len(texts[0]), {})
        for case in (FULL_CACHE, *cases):
            key = f"perplexity, {len(texts)} x {len(texts[0])} tokens, {case}"
            found[case] = self._journal.of(key, partial(measure, case), asdict, lambda kept: Perplexity(**kept))
            self._log(f"{key}: {found[case].value:.3f}")

    def recalls(self, engine: Start) -> None:
        """Needles under the full cache, under every policy at MIDDLE, and under FEW at other ratios."""
        others = [Case(name, ratio) for name in FEW for ratio in self._scale.needle_ratios]
        cases = [Case(name, MIDDLE) for name in self._chosen] + others
        for case in (FULL_CACHE, *cases):
            recall = partial(self._on, engine, "recall", self._needles, case)
            self.results.recall[case] = found = self._journal.of(f"needles, {case}", recall, list, list)
            self._log(f"needles, {case}: {sum(found)} of {len(found)}")

    def _on(self, engine: Start, method: str, *arguments: Any) -> Any:
        return getattr(engine(), method)(*arguments)

    def rouges(self, engine: Start) -> None:
        """Chat answers at MIDDLE against the full cache's."""
        tokens = self._scale.chat_tokens
        full = cache(lambda: engine().chat(self._chats, FULL_CACHE, tokens))

        def measure(case: Case) -> Likeness:
            answers = engine().chat(self._chats, case, tokens)
            kept = engine().kept  # of this case: `full` may still have to be computed
            score = float(np.mean([rouge_l(*pair) for pair in zip(answers, full(), strict=True)]))
            return Likeness(score, kept)

        for case in [Case(name, MIDDLE) for name in self._chosen]:
            key = f"ROUGE-L, {case}"
            self.results.likeness[case] = self._journal.of(
                key, partial(measure, case), asdict, lambda kept: Likeness(**kept)
            )
            self._log(f"{key}: {self.results.likeness[case]}")

    def reasons(self, engine: Start) -> None:
        """Experiments on an engine like the others'."""
        self._reason("asked", lambda: self._experiments.asked(engine(), self._names))
        self._reason("recent", lambda: self._experiments.recent(engine()))
        self._reason("position", lambda: self._experiments.position(engine(), self._names))

    def reasons_by_layers(self, engine: Start) -> None:
        """Experiments on an engine with EVERY_LAYER."""
        self._reason("layers", lambda: self._experiments.layers(engine()))

    def _reason(self, name: str, experiment: Callable[[], None]) -> None:
        """One experiment; what it finds is in the fields of the reasons whose names begin with its own."""
        found = self._experiments.found
        fields = [one for one in found.__slots__ if one.startswith(name)]

        def measure() -> dict[str, Any]:
            experiment()
            return {one: getattr(found, one) for one in fields}

        kept: dict[str, Any] = self._journal.of(f"reasons, {name}", measure, dict, dict)
        for one, values in kept.items():
            setattr(found, one, values)

    def probe(self, name: str, start: Start) -> dict[str, Any]:
        """Per policy, what every placement must agree on: surprises and a continuation of one text; and the moves."""
        return self._journal.of(f"probe, {name}", lambda: self._probe(start()), _encoded, _decoded)

    def _probe(self, engine: QualityEngine) -> dict[str, Any]:
        before = engine.snapshots.snapshot()
        read = {name: engine.read(self._passages[0], Case(name, MIDDLE), 24) for name in self._chosen}
        after = engine.snapshots.snapshot()
        moves = after.moves_total - before.moves_total
        return {"read": read, "moves": moves, "evicted": after.tokens_evicted_total - before.tokens_evicted_total}

    def compare(self, naive: dict[str, Any], strict: dict[str, Any], auto: dict[str, Any]) -> None:
        """Naive and eager under the strict reader, exactly; eager under reader auto, within NOISE."""
        results, noise = self.results, 0.0
        for name, (expected, continued) in naive["read"].items():
            found, added = strict["read"][name]
            if not np.array_equal(expected, found) or continued != added:
                results.faults.append(f"{name}: naive and vtoken differ under the strict reader")
            near = float(np.exp(auto["read"][name][0].mean() - expected.mean())) - 1
            noise = max(noise, abs(near))
            if abs(near) > NOISE:
                results.faults.append(f"{name}: perplexity under reader auto is {near:+.2%} beside the strict reader's")
        if not naive["evicted"] == strict["evicted"] > 0 or naive["moves"] or not strict["moves"]:
            results.faults.append("the placements don't differ, or not in the moves alone: nothing was compared")
        results.identity = {
            "policies": len(naive["read"]), "log_probs": sum(len(one[0]) for one in naive["read"].values()),
            "evicted": strict["evicted"], "moves": strict["moves"], "auto_noise": float(f"{noise:.2g}"),
        }  # fmt: skip
        self._log(f"identity: {results.identity}, faults: {results.faults}")


def _encoded(probe: dict[str, Any]) -> dict[str, Any]:
    read = {name: [surprises.tolist(), list(added)] for name, (surprises, added) in probe["read"].items()}
    return {**probe, "read": read}


def _decoded(kept: dict[str, Any]) -> dict[str, Any]:
    read = {name: (np.array(surprises, np.float64), tuple(added)) for name, (surprises, added) in kept["read"].items()}
    return {**kept, "read": read}
