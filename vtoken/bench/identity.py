"""Q8, identity: what must not show in a text does not show, and attention computes what it should.

    part        compared                                                          reader
    plugin      unmodified vLLM with the idle plugin, blocks of 32                native kernel
    placement   naive with eager, with lazy, and with lazy whose copies are slow  strict
    company     requests alone with the same requests in one batch of all         native kernel, strict, auto
    reference   log-probabilities with those of a dense float32 pass, at every    auto
                step (reference.py), in float32 and in bfloat16
    policies    the same under every policy that is shipped, and what they        auto
                forget with what they would by the dense pass's scores

The first three have no tolerance. They compare outputs in float32: unmodified vLLM's bfloat16 output depends on
the batch. Under the strict reader placement can't show by construction (I5). The native kernel and the matrix
products round differently in batches of other sizes; `company` would show a token that leads by no more than that.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any, cast

from rich.console import Console

from vtoken.bench.parts import Part
from vtoken.bench.prompts import RequestMaker
from vtoken.bench.reference import TOLERANCE, Comparison, Reference, compare, one_key_less, summary
from vtoken.bench.traces import Trace, TracedEngine
from vtoken.core.config import VTokenConfig
from vtoken.core.policies import policy_names
from vtoken.core.telemetry import Snapshot
from vtoken.results.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a run.

    Attributes:
        requests: with prompts of up to `longest_tokens`, that generate up to `tokens` tokens each.
        probes: so many of them are completed alone, too.
        controls: so many of them the reference part runs unevicted, too, and compares with a spoilt reference.
        per_policy: requests under every policy, the longest prompts of all.
    """

    requests: int
    longest_tokens: int
    tokens: int
    probes: int
    controls: int
    per_policy: int


FULL = Scale(requests=144, longest_tokens=400, tokens=52, probes=8, controls=8, per_policy=8)
QUICK = Scale(requests=24, longest_tokens=150, tokens=40, probes=2, controls=4, per_policy=2)

ENGINE: dict[str, Any] = {
    "dtype": "float32", "block_size": 16, "max_model_len": 1024, "max_num_seqs": 160, "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False, "num_gpu_blocks_override": 2400, "kv_cache_memory_bytes": 1 << 31,
}  # fmt: skip
"""Room for all requests of a full run at once, unevicted: 144 of 100 + 52 tokens on average."""

STRICT: dict[str, Any] = {"reader": "strict", "check_moves": 1.0, "poison_released": True}
LAZY: dict[str, Any] = {"relocation": "lazy", "headroom_blocks": 48, "theta_f": 0.1}
AUTO: dict[str, Any] = {"reader": "auto"}

WHOLE_PROMPTS = 1 << 14
"""Tokens of one step, for the policies part: attention is scored by chunk, and every prompt is to be one."""

SAME_CHOICES = 0.99
"""In float32, share of the forgotten tokens that the dense pass's scores must agree to: near-ties may differ."""

DELAYS_S = (0.0, 0.1, 1.0)
"""What slow copies wait for, in turn: nothing, about a step, and several steps, in which requests may end."""


@contextmanager
def engine(model: str, config: Mapping[str, Any] | None, **changes: Any) -> Iterator[TracedEngine]:
    """An engine that is closed whatever happens; None: vLLM without vToken."""
    settings = None if config is None else VTokenConfig.from_mapping(config)
    running = TracedEngine(model, settings, **{**ENGINE, **changes})
    try:
        yield running
    finally:
        running.close()


def slow_copies(worker: Any) -> None:
    """Runs in the worker process: every asynchronous copy waits first, so it lands long after it was planned."""
    thread = worker.substrate.copies._thread
    move, delays_s = thread._run, itertools.cycle(DELAYS_S)

    def slowly(*slots: Any) -> None:
        time.sleep(next(delays_s))
        move(*slots)

    thread._run = slowly


class Proof:
    """Owner of the parts; each method runs some engines, one after another."""

    def __init__(self, model: str, scale: Scale, log: Callable[..., None], data: str | None = None) -> None:
        self.parts = {name: Part() for name in ("plugin", "placement", "company", "reference", "policies")}
        self.samples: list[dict[str, Any]] = []
        self._model, self._log = model, log
        maker = RequestMaker.of_model(model, data)
        self._requests = maker.requests(scale.requests, scale.longest_tokens, scale.tokens)
        self._probes = Random(0).sample(range(scale.requests), scale.probes)
        self._controls, self._per_policy = scale.controls, scale.per_policy

    def plugin(self) -> None:
        """The plugin without a policy, against vLLM without the plugin."""
        with engine(self._model, None, block_size=32) as unmodified:
            expected = unmodified.complete(self._requests, plain=True)
        with engine(self._model, {}, block_size=32) as idle:
            found = idle.complete(self._requests, plain=True)
            self._compare("plugin", "idle", found, expected)
            self.company("idle", idle, [completion.token_ids for completion in found], plain=True)

    def placement(self) -> None:
        """The same evictions, hidden only, or reclaimed at once, or later, or much later (I5)."""
        last: dict[str, Snapshot] = {}
        with engine(self._model, {**STRICT, "variant": "naive"}) as naive:
            expected = naive.complete(self._requests)
            last["naive"] = naive.snapshots.snapshot()
        with engine(self._model, STRICT) as eager:
            found = eager.complete(self._requests)
            last["eager"] = eager.snapshots.snapshot()
            self._compare("placement", "eager", found, expected)
            self.company("strict", eager, [completion.token_ids for completion in found])
        with engine(self._model, {**STRICT, **LAZY}) as lazy:
            self._compare("placement", "lazy", lazy.complete(self._requests), expected)
            last["lazy"] = lazy.snapshots.snapshot()
            lazy.worker(cast("str", slow_copies))  # vLLM takes a function where it takes a name
            self._compare("placement", "slow copies", lazy.complete(self._requests), expected)
            last["slow copies"] = lazy.snapshots.snapshot()
        self._require_placed(last)

    def _require_placed(self, last: Mapping[str, Snapshot]) -> None:
        """The comparison shows something: tokens were forgotten, and moved at other times in every mode."""
        part = self.parts["placement"]
        evicted = {name: snapshot.tokens_evicted_total for name, snapshot in last.items()}
        moves = {name: snapshot.moves_total for name, snapshot in last.items()}
        evicted["slow copies"] -= evicted["lazy"]
        moves["slow copies"] -= moves["lazy"]
        part.notes |= {"evicted": evicted, "moves": moves}
        part.require("every mode forgets the same number of tokens", len(set(evicted.values())) == 1)
        part.require("each way of moving tokens moves others", 0 not in {*evicted.values(), *list(moves.values())[1:]})
        part.require("slow copies land at other times", moves["slow copies"] != moves["lazy"])
        for name, snapshot in last.items():
            part.require(f"{name} is not preempted", snapshot.preemptions_total == 0)
            part.require(f"{name} moves bytes unchanged", snapshot.move_check_failures_total == 0)

    def company(
        self, name: str, running: TracedEngine, together: Sequence[tuple[int, ...]], *, plain: bool = False
    ) -> None:
        """Complete the probes once more, each alone; `together`: token ids of all requests in one batch."""
        batch = running.most_running
        alone = [running.complete([self._requests[probe]], plain=plain)[0].token_ids for probe in self._probes]
        same = [found == together[probe] for found, probe in zip(alone, self._probes, strict=True)]
        self.parts["company"].count(name, same)
        self.parts["company"].notes[name]["batch"] = batch
        self.parts["company"].require(f"{name}: all requests ran together", batch == len(self._requests))
        self._log(f"company, {name}: {sum(same)} of {len(same)} the same alone and in a batch of {batch}")

    def reference(self, name: str, dtype: str, settings: Mapping[str, Any]) -> None:
        """What `reader: auto` computes, against the dense reference."""
        unevicted = [replace(request, options={"policy": "none"}) for request in self._requests[: self._controls]]
        with engine(self._model, {**AUTO, **settings}, dtype=dtype) as auto:
            traces = auto.trace(self._requests)
            if dtype == "float32":
                self.company(f"auto, {name}", auto, [tuple(trace.generated) for trace in traces])
            traces += auto.trace(unevicted)
        reference = Reference.of_directory(self._model)
        found = [compare(trace, reference) for trace in traces]
        spoilt = [compare(trace, reference, one_key_less) for trace in traces[: self._controls]]
        self._keep("reference", dtype, traces, found)
        part, tolerance, count = self.parts["reference"], TOLERANCE[dtype], len(self._requests)
        part.count(name, [one.agrees(tolerance) for one in found])
        shown = sum(not one.agrees(tolerance) for one in spoilt)
        part.notes[name] |= {
            **summary(found[:count]), "unevicted": summary(found[count:]), "one_key_less": summary(spoilt),
            "hidden_key_shows": f"{shown} of {len(spoilt)}", "tolerance": asdict(tolerance),
        }  # fmt: skip
        part.require(f"{name}: something is forgotten", part.notes[name]["forgotten"] > 0)
        part.require(f"{name}: small on average", part.notes[name]["mean_difference"] <= tolerance.overall)
        part.require(f"{name}: a hidden key shows", summary(spoilt)["mean_difference"] > tolerance.overall)
        self._log(f"reference, {name}: {part.notes[name]}")

    def policies(self, dtype: str) -> None:
        """Every policy that is shipped: attention over what it keeps, and whether it keeps what it should."""
        names = [name for name in policy_names() if name != "none"]
        longest = sorted(self._requests, key=lambda request: len(request.prompt))[-self._per_policy * len(names) :]
        requests = [
            replace(request, options={**request.options, "policy": names[index % len(names)]})
            for index, request in enumerate(longest)
        ]
        with engine(self._model, AUTO, dtype=dtype, max_num_batched_tokens=WHOLE_PROMPTS) as auto:
            traces = auto.trace(requests)
        reference = Reference.of_directory(self._model)
        found = [compare(trace, reference) for trace in traces]
        self._keep("policies", dtype, traces, found)
        part = self.parts["policies"]
        part.count(dtype, [one.agrees(TOLERANCE[dtype]) for one in found])
        for index, name in enumerate(names):
            of_policy = summary(found[index :: len(names)])
            part.notes[dtype][name] = of_policy
            part.require(f"{dtype}: {name} forgets something", of_policy["forgotten"] > 0)
            same = of_policy["by_our_scores"] >= SAME_CHOICES * of_policy["forgotten"]
            part.require(f"{dtype}: {name} forgets what it should", same or dtype != "float32")
            self._log(f"policies, {dtype}, {name}: {of_policy}")

    def _keep(self, part: str, dtype: str, traces: Sequence[Trace], found: Sequence[Comparison]) -> None:
        """Raw samples: one row per request that was compared with the dense pass."""
        self.samples += [
            {
                "part": part, "dtype": dtype, "request": index, "policy": trace.options.policy, "steps": one.steps,
                "prompt_tokens": len(trace.request.prompt), "largest_difference": one.largest,
                "mean_difference": one.mean, "forgotten": one.forgotten, "by_our_scores": one.expected,
            }
            for index, (trace, one) in enumerate(zip(traces, found, strict=True))
        ]  # fmt: skip

    def _compare(self, part: str, name: str, found: Sequence[Any], expected: Sequence[Any]) -> None:
        same = [one == other for one, other in zip(found, expected, strict=True)]
        self.parts[part].count(name, same)
        self._log(f"{part}, {name}: {self.parts[part].notes[name]}")


def run(model: str, console: Console, quick: bool, data: str | None = None) -> Outcome:
    """Prove every part; `data`: a directory with books to take prompts from."""
    proof = Proof(model, QUICK if quick else FULL, console.log, data)
    proof.plugin()
    proof.placement()
    proof.reference("float32", "float32", {})
    proof.reference("bfloat16", "bfloat16", {})
    proof.policies("float32")
    proof.policies("bfloat16")
    values = {name: part.values() for name, part in proof.parts.items()}
    passed = all(part.passed for part in proof.parts.values())
    return Outcome("identity", passed, values, samples=proof.samples)
