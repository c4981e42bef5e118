"""What it costs to know how much tokens matter: policies that look at attention or keys, while they decode.

Everything runs in one engine, in one process, and what differs is the request's own policy; two engines, or two
processes, would differ by more than what is measured. Rounds alternate: the same prompts, once under the policy and
once under its baseline, with as much read by attention in both:

    policy           baseline        made equal by
    scored, random   streaming_llm   every policy is asked as always and pays for its scores and its choice; then the
                                     oldest tokens are forgotten instead, as by the baseline: the same tokens are
                                     read and moved, and the outputs must be the same
    streaming_llm    none            the baseline's prompts are shorter by as much as it lacks decisions: on average
                                     as many live tokens. What is left is the decision, its moves, and relocated rows

One sample is one decision interval of 64 steps, the decision in its first; the first interval, which uses what was
observed of the prompt, is not counted. Judged by CPU seconds per interval, median over pairs of neighbours (of the
last comparison: per round, for only its average is equal). `inside` is the same without the noise of a whole engine:
how much more of the step time is spent in the substrate and in looking at queries, timed there. What the observation
of a prompt costs is reported as the ratio of whole prefills and not judged: it is paid once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

from rich.console import Console

from vtoken.bench import stepper
from vtoken.bench.child import Child
from vtoken.bench.stepper import Cost, Stepper, prompts
from vtoken.core.policies import Policy, RequestView, load_policy, needs_of, policy_names
from vtoken.core.scores import Needs
from vtoken.results.journal import Journal
from vtoken.results.outcome import Outcome
from vtoken.results.ratio import ratio

INTERVAL, BUDGET, BATCH = 64, 512, 4
PROMPT = BUDGET + INTERVAL
"""Prompts of exactly one decision more than the budget, so that all decisions forget as many tokens."""

BASELINE, NONE = "streaming_llm", "none"
BARS = {Needs.ATTENTION: 1.03, Needs.KEYS: 1.005, Needs.NOTHING: 1.005}
"""CPU seconds over those of the baseline."""


@dataclass(frozen=True, slots=True)
class Scale:
    """`rounds` of every policy and of its baseline, `intervals` samples in each."""

    policies: tuple[str, ...]
    rounds: int
    intervals: int


FULL = Scale(tuple(name for name in policy_names() if name != NONE), rounds=6, intervals=6)
QUICK = Scale(("streaming_llm", "h2o", "keydiff"), rounds=2, intervals=3)


@dataclass(frozen=True, slots=True)
class Round:
    """Some requests, completed together.

    Attributes:
        prefill: of their prompts. intervals: of each decision interval.
        looking_s: seconds in the intervals in which queries were looked at, outside the substrate.
        outputs: token ids by request.
    """

    prefill: Cost
    intervals: list[Cost]
    looking_s: float
    outputs: list[tuple[int, ...]]

    @property
    def inside(self) -> float:
        """The share of the intervals' time that the substrate and looking at queries took."""
        whole = sum(self.intervals, Cost())
        return (whole.substrate_s + self.looking_s) / whole.wall_s

    def samples(self, field: str, *, whole: bool) -> list[float]:
        """One of the costs, by interval, or of all together."""
        found = [float(getattr(cost, field)) for cost in self.intervals]
        return [math.fsum(found)] if whole else found


class Scored(Stepper):
    """An engine whose policies answer as BASELINE does, but not before they have chosen."""

    def __init__(self, model: str, engine_kwargs: Mapping[str, Any]) -> None:
        super().__init__(model, {}, engine_kwargs)
        self._looking_s = 0.0
        executor = self.engine._engine.engine_core.engine_core.model_executor
        scorer = executor.driver_worker.worker.substrate.scorer
        scorer.plan, scorer.observe = self._timed(scorer.plan), self._timed(scorer.observe)
        for name in policy_names():
            if name != NONE:
                answer_as_baseline(load_policy(name))

    def round(self, policy: str, prompt_tokens: int, intervals: int) -> Round:
        """BATCH prompts and `intervals` decision intervals behind the one that begins with the first decision."""
        options = {"policy": policy, **({} if policy == NONE else {"budget_tokens": BUDGET})}
        tokens = 2 + (1 + intervals) * INTERVAL
        given = {"vtoken": {**options, "interval_tokens": INTERVAL}}
        self.add(prompts(BATCH, prompt_tokens), tokens, extra_args=given)
        prefill = self.prefill()
        self.advance(INTERVAL)
        self._looking_s = 0.0
        costs = [self.advance(INTERVAL) for _ in range(intervals)]
        looking_s = self._looking_s
        self.advance(tokens)
        return Round(prefill, costs, looking_s, self.outputs())

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = perf_counter()
            try:
                return call(*arguments)
            finally:
                self._looking_s += perf_counter() - started

        return timed


def answer_as_baseline(policy: Policy) -> None:
    """From now on, forget the oldest tokens, but not before having chosen."""
    choose = policy.select

    def select(view: RequestView) -> Any:
        choose(view)
        return view.candidates[: view.excess]

    policy.select = select  # type: ignore[method-assign]


Pair = tuple[Round, Round]
"""A policy's round, and that of its baseline right before or after it."""


def run(model: str, console: Console, journal: Journal, *, quick: bool) -> Outcome:
    """Measure every policy, and one against itself."""
    scale = QUICK if quick else FULL
    longest = PROMPT + (2 + scale.intervals) * INTERVAL
    options = {
        "dtype": "bfloat16", "max_model_len": longest, "max_num_seqs": BATCH, "max_num_batched_tokens": BATCH * longest,
        "kv_cache_memory_bytes": 1 << 28,
    }  # fmt: skip
    found: dict[str, list[Pair]] = {name: [] for name in (*scale.policies, "control")}
    journal.begin(scale.rounds * len(found))
    with stepper.in_process(Scored, model, options) as engine:
        for policy in (NONE, *scale.policies):  # first rounds are not representative
            engine.call("round", policy, PROMPT, 1)
        for index in range(scale.rounds):
            for name, pairs in found.items():
                measure = partial(_pair, engine, name, scale.intervals, policy_first=index % 2 == 0)
                pairs.append(journal.of(f"round {index + 1}, {name}", measure, _encoded, _decoded))
                console.log(f"round {index + 1}, {name}: {summary(name, pairs)}")
    values = {name: summary(name, pairs) for name, pairs in found.items()}
    passed = all(holds(name, values[name]) for name in scale.policies)
    shape = {"interval_tokens": INTERVAL, "budget_tokens": BUDGET, "batch": BATCH}
    return Outcome("scoring", passed, {**values, **shape}, samples=_rows(found))


def _rows(found: Mapping[str, Sequence[Pair]]) -> list[dict[str, Any]]:
    """One row per decision interval."""
    return [
        {
            "policy": name, "round": number, "side": side, "interval": index, "cpu_s": cost.cpu_s,
            "wall_s": cost.wall_s, "substrate_s": cost.substrate_s, "inside_of_round": one.inside,
        }
        for name, pairs in found.items()
        for number, pair in enumerate(pairs)
        for side, one in zip(("policy", "baseline"), pair, strict=True)
        for index, cost in enumerate(one.intervals)
    ]  # fmt: skip


def _encoded(pair: Pair) -> list[dict[str, Any]]:
    return [*map(asdict, pair)]


def _decoded(kept: list[dict[str, Any]]) -> Pair:
    first, second = (
        Round(
            Cost(**one["prefill"]), [Cost(**cost) for cost in one["intervals"]], one["looking_s"],
            [tuple(ids) for ids in one["outputs"]],
        )
        for one in kept
    )  # fmt: skip
    return first, second


def _pair(engine: Child, name: str, intervals: int, *, policy_first: bool) -> Pair:
    """One round of a policy and one of its baseline."""
    policy = BASELINE if name == "control" else name
    baseline, prompt = (NONE, unevicted_prompt(intervals)) if name == BASELINE else (BASELINE, PROMPT)
    ours, theirs = ("round", policy, PROMPT, intervals), ("round", baseline, prompt, intervals)
    if policy_first:
        return engine.call(*ours), engine.call(*theirs)
    second, first = engine.call(*theirs), engine.call(*ours)
    return first, second


def unevicted_prompt(intervals: int) -> int:
    """Tokens of a prompt that is never evicted, for as many live tokens in the measured intervals on average.

    With a budget, live tokens go from BUDGET to BUDGET + INTERVAL in every interval. Without, they grow through all:
    by one interval that is not measured, and then half of the measured ones up to the middle.
    """
    return BUDGET + INTERVAL // 2 - INTERVAL - intervals * INTERVAL // 2


def summary(policy: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Of one policy: ratios over its baseline, medians over neighbours."""

    def over(field: str) -> dict[str, Any]:
        samples = [[one.samples(field, whole=policy == BASELINE) for one in pair] for pair in pairs]
        return ratio(*([value for pair in samples for value in pair[side]] for side in (0, 1))).to_mapping()

    inside = [ours.inside - theirs.inside for ours, theirs in pairs]
    prefill = ratio(*([pair[side].prefill.cpu_s for pair in pairs] for side in (0, 1)))
    return {
        "cpu": over("cpu_s"), "wall": over("wall_s"), "inside": round(math.fsum(inside) / len(inside), 5),
        "prefill_cpu": prefill.to_mapping(), "same_outputs": all(one.outputs == two.outputs for one, two in pairs),
    }  # fmt: skip


def holds(policy: str, values: Mapping[str, Any]) -> bool:
    """Whether a policy is within its bar, and was compared with the same work."""
    bar = BARS[needs_of(load_policy(policy))]
    return bool(values["cpu"]["median"] <= bar and (values["same_outputs"] or policy == BASELINE))
