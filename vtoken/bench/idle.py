"""Q5: what an engine pays for vToken while nothing is evicted.

The same requests in two engines, one of them unmodified vLLM (see `twins`). Judged by the share of step time that
vToken counts itself, and by the ratio of CPU seconds per token, which also holds what is not counted: the
scheduler's side, the metadata builder, statistics, and vLLM's own work for a connector. Of that last part a
connector that does nothing shows how much it is, and unmodified vLLM beside itself the error of the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console

from vtoken.bench import stepper
from vtoken.bench.stepper import Cost
from vtoken.bench.twins import Pair, Subject, Twins
from vtoken.results.journal import Journal
from vtoken.results.outcome import Outcome
from vtoken.results.ratio import ratio

SHARE_BAR = 0.01
"""Of the step time, inside the substrate."""

CPU_BAR = 1.01
"""CPU seconds per token over those of unmodified vLLM, median."""

PROMPT_TOKENS, WARM_UP_TOKENS, TOKENS = 32, 8, 24

OPTIONS = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28}


@dataclass(frozen=True, slots=True)
class Scale:
    """`pairs` runs at each concurrency, in each of `starts` times two fresh processes; of the others `fewer` times."""

    concurrencies: tuple[int, ...]
    starts: int
    fewer: int
    pairs: int


FULL = Scale((1, 8, 16), starts=4, fewer=2, pairs=6)
QUICK = Scale((1, 8), starts=1, fewer=1, pairs=5)

Found = dict[int, list[Pair]]
"""Pairs by concurrency."""


def run(model: str, console: Console, journal: Journal, *, quick: bool) -> Outcome:
    """Measure each concurrency."""
    scale = QUICK if quick else FULL
    found: dict[Subject, Found] = {
        subject: {concurrency: [] for concurrency in scale.concurrencies} for subject in Subject
    }
    journal.begin(2 * scale.starts + 4 * scale.fewer)
    for start in range(scale.starts):
        for subject in Subject if start < scale.fewer else [Subject.VTOKEN]:
            _measure(model, subject, scale, found[subject], journal, f"{subject}, start {start + 1}")
            console.log(f"{subject}: {values_of(found[subject])}")
    values = values_of(found[Subject.VTOKEN])
    others = {
        subject.value: {name: value["cpu_per_token_over_native"] for name, value in values_of(found[subject]).items()}
        for subject in (Subject.CONNECTOR, Subject.CONTROL)
    }
    samples = [row for subject, pairs in found.items() for row in _rows(subject, pairs)]
    return Outcome("idle", all(map(holds, values.values())), {**values, **others}, samples=samples)


def _rows(kind: str, found: Found) -> list[dict[str, Any]]:
    """One row per pair; seconds of whole runs."""
    return [
        {
            "kind": kind, "concurrency": concurrency, "steps": pair.ours.steps, "tokens": pair.ours.tokens,
            "cpu_s": pair.ours.cpu_s, "native_cpu_s": pair.native.cpu_s, "wall_s": pair.ours.wall_s,
            "native_wall_s": pair.native.wall_s, "substrate_s": pair.ours.substrate_s, "identical": pair.identical,
        }
        for concurrency, pairs in found.items()
        for pair in pairs
    ]  # fmt: skip


def _measure(model: str, subject: Subject, scale: Scale, found: Found, journal: Journal, name: str) -> None:
    """The pairs of two processes in which the engines start in either order, added up."""
    first, second = (
        journal.of(
            f"{name}, {'unmodified' if native_first else 'ours'} first",
            partial(_process, model, subject, scale, native_first), _encoded, _decoded,
        )
        for native_first in (True, False)
    )  # fmt: skip
    for concurrency, pairs in found.items():
        pairs += [a + b for a, b in zip(first[concurrency], second[concurrency], strict=True)]


def _encoded(found: Found) -> dict[str, list[dict[str, Any]]]:
    return {str(concurrency): [*map(asdict, pairs)] for concurrency, pairs in found.items()}


def _decoded(kept: dict[str, list[dict[str, Any]]]) -> Found:
    return {
        int(concurrency): [Pair(Cost(**one["ours"]), Cost(**one["native"]), one["identical"]) for one in pairs]
        for concurrency, pairs in kept.items()
    }


def _process(model: str, subject: Subject, scale: Scale, native_first: bool) -> Found:
    """All pairs of one process."""
    found: Found = {}
    with stepper.in_process(partial(Twins, native_first=native_first), model, subject, OPTIONS) as twins:
        for concurrency in scale.concurrencies:
            twins.call("run", concurrency, PROMPT_TOKENS, WARM_UP_TOKENS)  # first steps are not representative
            found[concurrency] = [twins.call("run", concurrency, PROMPT_TOKENS, TOKENS) for _ in range(scale.pairs)]
    return found


def values_of(found: Found) -> dict[str, dict[str, Any]]:
    """The values of every concurrency."""
    return {str(concurrency): summary(pairs) for concurrency, pairs in found.items()}


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The values of one concurrency; ratios are medians over the pairs."""
    substrate_s = math.fsum(pair.ours.substrate_s for pair in pairs)
    return {
        "substrate_share": round(substrate_s / math.fsum(pair.ours.wall_s for pair in pairs), 5),
        "substrate_us_per_step": round(1e6 * substrate_s / sum(pair.ours.steps for pair in pairs), 1),
        "cpu_per_token_over_native": ratio([p.ours.cpu_s for p in pairs], [p.native.cpu_s for p in pairs]).to_mapping(),
        "wall_per_token_over_native": ratio(
            [p.ours.wall_s for p in pairs], [p.native.wall_s for p in pairs]
        ).to_mapping(),
        "outputs_identical": all(pair.identical for pair in pairs),
    }


def holds(values: dict[str, Any]) -> bool:
    """Whether one concurrency is within the bars."""
    share, cpu = values["substrate_share"], values["cpu_per_token_over_native"]["median"]
    return bool(share <= SHARE_BAR and cpu <= CPU_BAR and values["outputs_identical"])
