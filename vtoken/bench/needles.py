"""Why H2O finds no needle here: what is kept of one, by score and by how many share a choice. transformers alone.

A haystack is read once by transformers' own model; then half of its tokens are hidden, by the scores of that one pass,
and the question and the answer are read. Nothing of the substrate takes part.

    score       h2o         mass from all tokens behind, added up
                question    mass from the question's tokens, which no policy has before the question
                window      nothing: the newest tokens are kept
    shared by   all         one set for all layers and heads, as token tables have it
                layer       a set per layer
                head        a set per layer and KV head, as in H2O's paper

A needle is found if the model's likeliest next tokens are its number. The bar is of the experiment itself: the full
cache and the question's own choice must find needles, else nothing is explained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from vtoken.bench.masked_model import MaskedModel
from vtoken.bench.quality_texts import NEEDLE, QUESTION, Needle, Texts
from vtoken.results.outcome import Outcome

NEEDLES, QUICK_NEEDLES, TOKENS = 16, 4, 512
SINKS, RECENT = 4, 32
SHARES = (0.5, 0.85, 0.95)
LEAST_FOUND = 0.7
"""Of the needles, by the full cache; of those, by the question's own choice."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
FULL, QUESTION_ALL = "full cache", "question, all, 0.5"


@dataclass(frozen=True, slots=True)
class Found:
    """Of one needle: whether it was found, and the share of its tokens that was kept, over layers and heads."""

    found: bool
    kept: float


def run(model: str, console: Console, quick: bool, data: str | None) -> Outcome:
    """Ask for every needle under every choice.

    Raises:
        ConfigError: there are no books.
    """
    texts = Texts.of_directory(model, data)
    asked, found = MaskedModel(model), dict[str, list[Found]]()
    for needle in texts.needles(QUICK_NEEDLES if quick else NEEDLES, TOKENS, TOKENS):
        for name, one in answers(asked, texts, needle).items():
            found.setdefault(name, []).append(one)
        console.log(f"needle at {needle.depth:.2f}: {[name for name, ones in found.items() if ones[-1].found]}")
    return outcome(found)


def answers(asked: MaskedModel, texts: Texts, needle: Needle) -> dict[str, Found]:
    """What becomes of one needle, by choice."""
    size = len(needle.prompt) - len(texts.ids(QUESTION))
    number = texts.ids(f" {needle.number}")
    suffix = [*needle.prompt[size:], *number]
    place = place_of(texts.ids(NEEDLE.format(number=needle.number)), needle.prompt[:size])
    haystack = asked.read(needle.prompt[:size])
    full, by_question = haystack.ask(suffix, len(number), None)
    found = {FULL: Found(full == number, 1.0)}
    for name, kept in choices(haystack.mass, by_question, size):
        answer, _ = haystack.ask(suffix, len(number), kept)
        found[name] = Found(answer == number, float(kept[..., place].mean()))
    return found


def choices(mass: Floats, by_question: Floats, size: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Name and kept tokens of every score, sharing and share; all arrays are [layers, KV heads, size]."""
    for share in SHARES:
        for shared, axes in (("all", (0, 1)), ("layer", (1,)), ("head", ())):
            scores = np.broadcast_to(mass.mean(axis=axes, keepdims=True), mass.shape)
            yield f"h2o, {shared}, {share}", kept_by(scores, round(share * size))
    one = np.broadcast_to(by_question.mean(axis=(0, 1), keepdims=True), mass.shape)
    yield QUESTION_ALL, kept_by(one, size // 2)
    yield "window, all, 0.5", kept_by(np.broadcast_to(np.arange(size, dtype=np.float32), mass.shape), size // 2)


def kept_by(scores: Floats, count: int) -> np.ndarray[Any, Any]:
    """The `count` best of the last axis, with the sinks and the newest always among them; bool, as scores."""
    protected = scores.copy()
    protected[..., :SINKS] = protected[..., -RECENT:] = np.inf
    best = np.argsort(-protected, axis=-1, kind="stable")[..., :count]
    kept = np.zeros(scores.shape, bool)
    np.put_along_axis(kept, best, values=True, axis=-1)
    return kept


def place_of(tokens: Sequence[int], text: Sequence[int]) -> slice:
    """Where `tokens` stand in `text`."""
    at = next(at for at in range(len(text)) if list(text[at : at + len(tokens)]) == list(tokens))
    return slice(at, at + len(tokens))


def outcome(found: Mapping[str, Sequence[Found]]) -> Outcome:
    """Counts by choice, and whether the experiment can explain anything."""
    counts = {name: sum(one.found for one in ones) for name, ones in found.items()}
    asked = len(found[FULL])
    holds = counts[FULL] >= LEAST_FOUND * asked and counts[QUESTION_ALL] >= LEAST_FOUND * counts[FULL]
    kept = {name: round(float(np.mean([one.kept for one in ones])), 3) for name, ones in found.items()}
    samples = [
        {"choice": name, "needle": index, "found": one.found, "kept": round(one.kept, 4)}
        for name, ones in found.items() for index, one in enumerate(ones)
    ]  # fmt: skip
    return Outcome("needles", holds, {"needles": asked, "found": counts, "needle_kept": kept}, samples=samples)
