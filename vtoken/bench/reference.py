"""What the engine should have said: a dense float32 forward pass over exactly the tokens that are kept.

Nothing of the substrate takes part in it. transformers' model reads the whole text in one pass, rotary
positions as they are, under a mask [query, key] that says which keys are alive when each query is
computed. Row q of that pass is then the step in which the engine computed token q:

    query   q < prompt       every key up to q
            q >= prompt      the keys that no decision up to this step has forgotten, and q itself

The decisions are made again here, from the prompt and the options, in a table of one block in which nothing
ever moves, and compared with the worker's own tables after every step. A policy that looks at attention or keys
can't be asked before there are any: the mask is then what the worker's tables said, and the pass itself provides the
scores for a second opinion (choices.py). The text is the engine's (teacher forcing), so an error can't hide behind a
text that has gone another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.bench.choices import Choices, DenseScores, Follower
from vtoken.bench.traces import Trace
from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.eviction import Forgetting
from vtoken.core.plan import Ints
from vtoken.core.policies import load_policy, needs_of
from vtoken.core.scores import Needs
from vtoken.core.table import TokenTable
from vtoken.device.scorer import chosen_layers
from vtoken.engine.requests import prompt_seed

Floats = npt.NDArray[np.float32]


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
        return _log_probs(self._pass(text, seen))

    def scored(self, text: Sequence[int], seen: Sequence[Ints]) -> tuple[Floats, DenseScores]:
        """The same, and what the pass says about attention and keys in the layers that a worker looks at."""
        answer = self._pass(text, seen, output_attentions=True, use_cache=True)
        names = [str(index) for index in range(len(answer.attentions))]
        layers = list(map(int, chosen_layers(names, VTokenConfig().score_layers)))
        weights = sum(answer.attentions[layer][0].double().mean(0) for layer in layers) / len(layers)
        caches = [answer.past_key_values.layers[layer] for layer in layers]
        keys, values = (tuple(getattr(c, of)[0].transpose(0, 1) for c in caches) for of in ("keys", "values"))
        return _log_probs(answer), DenseScores(weights.numpy(), keys, values)

    def _pass(self, text: Sequence[int], seen: Sequence[Ints], **wanted: bool) -> Any:
        import torch

        hidden = torch.from_numpy(~mask_of(seen, len(text)))
        bias = torch.zeros(1, 1, len(text), len(text)).masked_fill_(hidden, float("-inf"))
        wanted = {"use_cache": False, **wanted}
        with torch.inference_mode():
            return self._model(torch.tensor([text]), attention_mask=bias, logits_to_keep=len(seen), **wanted)


def _log_probs(answer: Any) -> Floats:
    found: Floats = answer.logits[0].log_softmax(dim=-1).numpy()
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace beside the reference.

    Attributes:
        steps: generated tokens.
        differences: of log-probabilities, absolute, in nats; those of all steps.
        wrong_live_sets: steps at which the worker's live tokens were others than ours, or, under a policy that looks
            at scores, none that the budget rule can lead to.
        same_top: steps at which both find the same token most likely.
        forgotten: tokens that are not seen by the last query.
        expected: of these, tokens that the policy forgets by our scores, too.
    """

    steps: int
    differences: Floats
    wrong_live_sets: int
    same_top: int
    forgotten: int
    expected: int

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
    expected, choices = _expected(trace, reference, change)
    return Comparison(
        len(trace.generated),
        np.concatenate([_differences(*step) for step in zip(expected, trace.top, strict=True)]),
        choices.wrong_live_sets,
        int((expected.argmax(axis=1) == trace.generated).sum()),
        choices.forgotten,
        choices.expected,
    )


def _expected(trace: Trace, reference: Reference, change: Callable[[Ints], Ints]) -> tuple[Floats, Choices]:
    """Log-probabilities after every step, and what is to be said about the kept tokens."""
    prompt, options = trace.request.prompt, trace.options
    text = [*prompt, *trace.generated[:-1]]
    if options.evicts and needs_of(load_policy(options.policy)) is not Needs.NOTHING:
        kept = [np.array(live, np.int64) for live in trace.live]
        expected, scores = reference.scored(text, [change(ids) for ids in kept])
        return expected, Follower(trace, scores).follow()
    seen = live_sets(prompt, options, len(trace.generated))
    wrong = sum(ids.tolist() != live for ids, live in zip(seen, trace.live, strict=True))
    forgotten = len(text) - len(seen[-1])
    return reference.log_probs(text, [change(ids) for ids in seen]), Choices(forgotten, forgotten, wrong)


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
        "by_our_scores": sum(one.expected for one in comparisons),
    }


def one_key_less(ids: Ints) -> Ints:
    """A control: the middle one of the keys that a query sees is hidden from it."""
    return np.delete(ids, len(ids) // 2)
