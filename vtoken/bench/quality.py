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

from dataclasses import asdict
from functools import partial

from rich.console import Console

from vtoken.bench import quality_report
from vtoken.bench.quality_engine import FULL_CACHE, Case, quality_engine
from vtoken.bench.quality_measurement import MIDDLE, Measurement, Results, Scale
from vtoken.bench.quality_reasons import EVERY_LAYER
from vtoken.bench.quality_scores import MONOTONE_TOLERANCE, Perplexity, falls
from vtoken.bench.quality_texts import Texts
from vtoken.results.journal import Journal, lazily
from vtoken.results.outcome import Outcome

FULL = Scale((0.7, 0.5, 0.3), 3, 1024, 1, 4096, 20, (512, 1536), (0.7, 0.3), 6, 160, all_policies=True, reasons=True)
QUICK = Scale((0.7, 0.3), 1, 512, 0, 0, 5, (512, 512), (), 2, 64, all_policies=False, reasons=False)


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


def run(model: str, console: Console, journal: Journal, quick: bool, data: str | None) -> Outcome:
    """Measure; `data`: directory with books.

    Raises:
        ConfigError: there are no books, or too little text.
    """
    scale = QUICK if quick else FULL
    measured = Measurement(Texts.of_directory(model, data), scale, console, journal)
    journal.begin(measured.pieces)
    longest = max(scale.text_tokens, scale.long_tokens, scale.needle_tokens[1])
    with lazily(partial(quality_engine, model, {"reader": "strict", "variant": "naive"}, longest)) as engine:
        naive = measured.probe("naive", engine)
    with lazily(partial(quality_engine, model, {"reader": "strict", "check_moves": 1.0}, longest)) as engine:
        strict = measured.probe("strict", engine)
    with lazily(partial(quality_engine, model, {}, longest)) as engine:
        measured.compare(naive, strict, measured.probe("auto", engine))
        measured.perplexities(engine)
        measured.recalls(engine)
        measured.rouges(engine)
        if scale.reasons:
            measured.reasons(engine)
    if scale.reasons:
        with lazily(partial(quality_engine, model, EVERY_LAYER, longest)) as engine:
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
