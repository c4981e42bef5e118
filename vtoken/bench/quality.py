"""Q11, quality: what forgetting costs, by policy and share of tokens kept, through the real engine.

    measure      what is evicted, and when                     beside
    perplexity   a text given as prompt, after every chunk     the full cache on the same tokens
    needle       a haystack, before the question is read       the full cache on the same haystacks
    ROUGE-L      chat answers while they are generated         the full cache's own answers
    identity     the same, in all placements                   naive under the strict reader, exactly

Prompts are computed in chunks of CHUNK_TOKENS, one request at a time, in float32: a token of a later chunk is
predicted from what the policies left of the earlier ones, and of its own chunk.

The bar is what must hold whatever a policy is worth: reclamation doesn't change a single log-probability, and
keeping more doesn't hurt. Which policy is better than which is reported, not required.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from vtoken.bench import quality_report
from vtoken.bench.quality_engine import FULL_CACHE, Case, QualityEngine, quality_engine
from vtoken.bench.quality_reasons import EVERY_LAYER, Experiments, Reasons
from vtoken.bench.quality_scores import MONOTONE_TOLERANCE, Likeness, Perplexity, falls, perplexity, rouge_l
from vtoken.bench.quality_texts import Texts
from vtoken.core.policies import policy_names
from vtoken.results.outcome import Outcome

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


FULL = Scale((0.7, 0.5, 0.3), 3, 1024, 1, 4096, 20, (512, 1536), (0.7, 0.3), 6, 160, all_policies=True, reasons=True)
QUICK = Scale((0.7, 0.3), 1, 512, 0, 0, 5, (512, 512), (), 2, 64, all_policies=False, reasons=False)


@dataclass(slots=True)
class Results:
    """Everything that was measured, by case; perplexities also by text length in tokens."""

    perplexity: dict[int, dict[Case, Perplexity]] = field(default_factory=dict)
    recall: dict[Case, list[bool]] = field(default_factory=dict)
    likeness: dict[Case, Likeness] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    reasons: Reasons = field(default_factory=Reasons)
    faults: list[str] = field(default_factory=list)


class Measurement:
    """Owner of the results; each method measures one thing on an engine."""

    def __init__(self, texts: Texts, scale: Scale, console: Console) -> None:
        self.results = Results()
        self._scale, self._log = scale, console.log
        self._names = [name for name in policy_names() if name != FULL_CACHE.policy]
        self._chosen = self._names if scale.all_policies else FEW
        self._passages = texts.passages(scale.texts, scale.text_tokens)
        self._long = texts.passages(scale.long_texts, scale.long_tokens)
        self._needles = texts.needles(scale.needles, *scale.needle_tokens)
        self._chats = texts.chats(scale.chats)
        self._experiments = Experiments(self._passages, self._needles, MIDDLE, console)
        self.results.reasons = self._experiments.found

    def perplexities(self, engine: QualityEngine) -> None:
        """Every policy at every ratio; on long texts FEW, at the lower ratios."""
        scale = self._scale
        cases = [Case(name, ratio) for name in self._names for ratio in scale.ratios]
        self._perplexity(engine, self._passages, cases)
        if self._long:
            low = [ratio for ratio in scale.ratios if ratio <= MIDDLE]
            self._perplexity(engine, self._long, [Case(name, ratio) for name in FEW for ratio in low])

    def _perplexity(self, engine: QualityEngine, texts: Sequence[list[int]], cases: Sequence[Case]) -> None:
        full = engine.surprises(texts, FULL_CACHE)
        found = self.results.perplexity.setdefault(len(texts[0]), {})
        for case in (FULL_CACHE, *cases):
            surprises = full if case == FULL_CACHE else engine.surprises(texts, case)
            found[case] = perplexity(surprises, full, engine.kept)
            self._log(f"perplexity, {len(texts)} x {len(texts[0])} tokens, {case}: {found[case].value:.3f}")

    def recalls(self, engine: QualityEngine) -> None:
        """Needles under the full cache, under every policy at MIDDLE, and under FEW at other ratios."""
        others = [Case(name, ratio) for name in FEW for ratio in self._scale.needle_ratios]
        cases = [Case(name, MIDDLE) for name in self._chosen] + others
        for case in (FULL_CACHE, *cases):
            self.results.recall[case] = found = engine.recall(self._needles, case)
            self._log(f"needles, {case}: {sum(found)} of {len(found)}")

    def rouges(self, engine: QualityEngine) -> None:
        """Chat answers at MIDDLE against the full cache's."""
        tokens = self._scale.chat_tokens
        full = engine.chat(self._chats, FULL_CACHE, tokens)
        for case in [Case(name, MIDDLE) for name in self._chosen]:
            answers = engine.chat(self._chats, case, tokens)
            score = float(np.mean([rouge_l(*pair) for pair in zip(answers, full, strict=True)]))
            self.results.likeness[case] = Likeness(score, engine.kept)
            self._log(f"ROUGE-L, {case}: {self.results.likeness[case]}")

    def reasons(self, engine: QualityEngine) -> None:
        """Experiments on an engine like the others'."""
        self._experiments.asked(engine, self._names)
        self._experiments.recent(engine)
        self._experiments.position(engine, self._names)

    def reasons_by_layers(self, engine: QualityEngine) -> None:
        """Experiments on an engine with EVERY_LAYER."""
        self._experiments.layers(engine)

    def probe(self, engine: QualityEngine) -> dict[str, Any]:
        """Per policy, what every placement must agree on: surprises and a continuation of one text; and the moves."""
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


def unmonotone(found: dict[Case, Perplexity]) -> dict[str, float]:
    """Policies whose perplexity falls by more than MONOTONE_TOLERANCE where they keep less, and by how much."""
    by_policy: dict[str, dict[float, float]] = {}
    for case, one in found.items():
        by_policy.setdefault(case.policy, {1.0: found[FULL_CACHE].value})[case.ratio] = one.value
    all_falls = {policy: falls(by_ratio) for policy, by_ratio in by_policy.items()}
    return {policy: round(fall, 4) for policy, fall in all_falls.items() if fall > MONOTONE_TOLERANCE}


def ordering_as_published(recall: dict[Case, list[bool]]) -> bool:
    """Whether, at MIDDLE, random finds fewer needles than streaming_llm."""
    return sum(recall[Case("random", MIDDLE)]) < sum(recall[Case("streaming_llm", MIDDLE)])


def run(model: str, console: Console, quick: bool, data: str | None) -> Outcome:
    """Measure; `data`: directory with books.

    Raises:
        ConfigError: there are no books, or too little text.
    """
    scale = QUICK if quick else FULL
    measured = Measurement(Texts.of_directory(model, data), scale, console)
    longest = max(scale.text_tokens, scale.long_tokens, scale.needle_tokens[1])
    with quality_engine(model, {"reader": "strict", "variant": "naive"}, longest) as engine:
        naive = measured.probe(engine)
    with quality_engine(model, {"reader": "strict", "check_moves": 1.0}, longest) as engine:
        strict = measured.probe(engine)
    with quality_engine(model, {}, longest) as engine:
        measured.compare(naive, strict, measured.probe(engine))
        measured.perplexities(engine)
        measured.recalls(engine)
        measured.rouges(engine)
        if scale.reasons:
            measured.reasons(engine)
    if scale.reasons:
        with quality_engine(model, EVERY_LAYER, longest) as engine:
            measured.reasons_by_layers(engine)
    results = measured.results
    for table in quality_report.tables(results.perplexity, results.recall, results.likeness):
        console.print(table)
    return outcome(results)


def outcome(results: Results) -> Outcome:
    """Whether the bar holds, and all values."""
    wrong = {tokens: unmonotone(found) for tokens, found in results.perplexity.items()}
    values = {
        **quality_report.values(results.perplexity, results.recall, results.likeness),
        "identity": results.identity, "reasons": asdict(results.reasons), "faults": results.faults,
        "unmonotone": {tokens: found for tokens, found in wrong.items() if found},
        "ordering_as_published": ordering_as_published(results.recall),
    }  # fmt: skip
    rows = quality_report.rows(results.perplexity, results.recall, results.likeness)
    return Outcome("quality", not results.faults and not any(wrong.values()), values, samples=[*map(asdict, rows)])
