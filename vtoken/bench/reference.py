"""What the engine should have said: a dense float32 forward pass over exactly the tokens that are kept.

Nothing of the substrate takes part in it. transformers' model reads the whole text in one pass, rotary
positions as they are, under a mask [query, key] that says which keys are alive when each query is
computed. Row q of that pass is then the step in which the engine computed token q:

    query   q < prompt       every key up to q
            q >= prompt      the keys that no decision up to this step has forgotten, and q itself

The decisions are made again here, from the prompt and the options, in a table of one block in which nothing
ever moves, and compared with the worker's own tables after every step. The text is the engine's (teacher
forcing), so an error can't hide behind a text that has gone another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.bench.prompts import Request
from vtoken.core.config import PolicyOptions
from vtoken.core.eviction import Forgetting
from vtoken.core.plan import Ints
from vtoken.core.policies import load_policy
from vtoken.core.table import TokenTable
from vtoken.engine.offline import Completion, OfflineEngine
from vtoken.engine.requests import prompt_seed

Floats = npt.NDArray[np.float32]

TOP = 20
"""Log-probabilities compared per step, the engine's largest: vLLM's default limit."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Accepted differences of log-probabilities, in nats.

    Attributes:
        largest, mean: within one request. overall: on average over all requests.
    """

    largest: float
    mean: float
    overall: float


TOLERANCE = {"float32": Tolerance(1e-3, 1e-4, 2e-5), "bfloat16": Tolerance(2.5, 0.2, 0.07)}
"""By the engine's dtype.

Engine and reference have the same weights (bfloat16 in the file) and formulas; they round differently, whether tokens
are forgotten or not. Seen in 64 to 144 requests, of each the 20 likeliest tokens:

                                            float32                   bfloat16
                                            largest   overall         largest   mean     overall
    nothing forgotten                       7e-5      8e-6            0.85      0.075    0.054
    forgotten                               1.1e-4    8e-6            1.19      0.099    0.053
    the reference misses one key per step   0.6 to 8  0.11 to 0.24    0.6 to 8  0.07 up  0.14 to 0.24

In bfloat16 a logit between 16 and 32 is a multiple of 1/8, and the largest differences are those of tokens with a
probability below 1e-6. One request's noise may exceed the effect of a missing key there; the overall mean does not.
"""


@dataclass(slots=True)
class Trace:
    """What the engine did with one request.

    Attributes:
        generated: token ids, one per step.
        top: per step, log-probabilities by token id.
        live: per step, the live token ids in the worker's table.
    """

    request: Request
    generated: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    live: list[list[int]] = field(default_factory=list)


class TracedEngine(OfflineEngine):
    """An OfflineEngine for requests with options of their own, whose steps can be traced.

    Attributes:
        most_running: requests that ran in one step.
    """

    most_running = 0

    def complete(self, requests: Sequence[Request], *, plain: bool = False) -> list[Completion]:
        """Complete all requests together; `plain`: without vToken's options."""
        names = [self.add(request.prompt, **request.sampling(plain=plain)) for request in requests]
        done: dict[str, Completion] = {}
        while self.busy:
            done |= {name: completion for name, completion, _ in self.step()}
            self._look()
        self.settle()
        return [done[name] for name in names]

    def trace(self, requests: Sequence[Request]) -> list[Trace]:
        """Complete all requests together, and look into the worker after every step."""
        traces = {
            self.add(request.prompt, logprobs=TOP, detokenize=False, **request.sampling()): Trace(request)
            for request in requests
        }
        while self.busy:
            outputs = self.advance()
            # The worker knows a request by its id and vLLM's suffix.
            rows = {name.rpartition("-")[0]: row for name, row in self.worker("vtoken_rows").items()}
            for output in outputs:
                trace, completion = traces[output.request_id], output.outputs[0]
                trace.generated = list(completion.token_ids)
                trace.top.append({token: entry.logprob for token, entry in completion.logprobs[-1].items()})
                trace.live.append(rows[output.request_id]["live"])
            self._look()
        self.settle()
        return list(traces.values())

    def _look(self) -> None:
        self.most_running = max(self.most_running, self.snapshots.snapshot().running_requests)


def live_sets(prompt: Sequence[int], options: PolicyOptions, steps: int) -> list[Ints]:
    """Per step, the ids that its query sees, its own included; the query of step 0 is the last prompt token."""
    table = TokenTable(len(prompt) + steps, options.protect_sinks, options.protect_recent)
    table.add_blocks([0])
    table.sync_new_tokens(len(prompt))
    forgetting = Forgetting(options, len(prompt), prompt_seed(prompt))
    seen = [table.live_ids()]
    for step in range(1, steps):
        if forgetting.due(table):
            table.evict(forgetting.choose(table, load_policy(options.policy)))
        table.sync_new_tokens(len(prompt) + step)
        seen.append(table.live_ids())
    return seen


def mask_of(seen: Sequence[Ints], length: int) -> npt.NDArray[np.bool_]:
    """Which key each query sees, [length, length]: causal, and as `seen` says for the last queries."""
    mask = np.tril(np.ones((length, length), bool))
    for query, ids in enumerate(seen, length - len(seen)):
        mask[query] = False
        mask[query, ids] = True
    return mask


class Reference:
    """transformers' model in float32."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def of_directory(cls, model: str) -> Reference:
        """Load a model directory: its size in float32 of memory."""
        import torch
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        return cls(loaded.eval())

    def log_probs(self, text: Sequence[int], seen: Sequence[Ints]) -> Floats:
        """Log-probabilities after each of the text's last `len(seen)` tokens, [len(seen), vocabulary]."""
        import torch

        hidden = torch.from_numpy(~mask_of(seen, len(text)))
        bias = torch.zeros(1, 1, len(text), len(text)).masked_fill_(hidden, float("-inf"))
        with torch.inference_mode():
            answer = self._model(torch.tensor([text]), attention_mask=bias, logits_to_keep=len(seen), use_cache=False)
            found: Floats = torch.log_softmax(answer.logits[0], dim=-1).numpy()
        return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace beside the reference.

    Attributes:
        steps: generated tokens.
        differences: of log-probabilities, absolute, in nats; those of all steps.
        wrong_live_sets: steps at which the worker's live tokens were others than ours.
        same_top: steps at which both find the same token most likely.
        forgotten: tokens that are not seen by the last query.
    """

    steps: int
    differences: Floats
    wrong_live_sets: int
    same_top: int
    forgotten: int

    def agrees(self, tolerance: Tolerance) -> bool:
        """Whether the worker's live sets are ours, and the differences within the tolerance."""
        return self.wrong_live_sets == 0 and self.largest <= tolerance.largest and self.mean <= tolerance.mean

    @property
    def largest(self) -> float:
        """The largest difference."""
        return float(self.differences.max())

    @property
    def mean(self) -> float:
        """The mean difference."""
        return float(self.differences.mean())


def compare(trace: Trace, reference: Reference, change: Callable[[Ints], Ints] = lambda ids: ids) -> Comparison:
    """Compare all steps of a trace; for controls, `change` spoils what each query sees."""
    prompt, options = trace.request.prompt, PolicyOptions().override(trace.request.options)
    seen = live_sets(prompt, options, len(trace.generated))
    text = [*prompt, *trace.generated[:-1]]
    expected = reference.log_probs(text, [change(ids) for ids in seen])
    return Comparison(
        len(seen),
        np.concatenate([_differences(*step) for step in zip(expected, trace.top, strict=True)]),
        sum(ids.tolist() != live for ids, live in zip(seen, trace.live, strict=True)),
        int((expected.argmax(axis=1) == trace.generated).sum()),
        len(text) - len(seen[-1]),
    )


def _differences(expected: Floats, top: dict[int, float]) -> Floats:
    """Of one step: the engine's likeliest tokens, and the largest on both sides, whichever tokens they are."""
    found = np.fromiter(top.values(), np.float32)
    difference: Floats = np.append(expected[list(top)] - found, expected.max() - found.max())
    return np.abs(difference)


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """All of them together."""
    differences = np.concatenate([one.differences for one in comparisons])
    steps = sum(one.steps for one in comparisons)
    return {
        "steps": steps,
        "log_probs": len(differences),
        "max_difference": round(float(differences.max()), 6),
        "mean_difference": round(float(differences.mean()), 6),
        "same_top_token": round(sum(one.same_top for one in comparisons) / steps, 5),
        "wrong_live_sets": sum(one.wrong_live_sets for one in comparisons),
        "forgotten": sum(one.forgotten for one in comparisons),
    }


def one_key_less(ids: Ints) -> Ints:
    """A control: the middle one of the keys that a query sees is hidden from it."""
    return np.delete(ids, len(ids) // 2)
