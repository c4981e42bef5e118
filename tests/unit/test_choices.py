"""Second opinions on scored decisions, against a decode loop that looks at its own attention step by step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from tests.unit.test_reference import text_of, tiny_model
from vtoken.bench import choices
from vtoken.bench.prompts import Request
from vtoken.bench.reference import Reference, compare
from vtoken.bench.traces import Trace
from vtoken.core.config import VTokenConfig
from vtoken.device.scorer import chosen_layers

PROMPT, TOKENS, BUDGET, SINKS, RECENT, INTERVAL = 20, 40, 12, 2, 4, 3
OPTIONS = {"budget_tokens": BUDGET, "protect_sinks": SINKS, "protect_recent": RECENT, "interval_tokens": INTERVAL}
LAYERS = list(map(int, chosen_layers("012", VTokenConfig().score_layers)))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


class Loop:
    """One request, one query after another, with a cache from which forgotten tokens are cut out."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model, self.cache = model, DynamicCache()
        self.live: list[int] = []
        self.total: Counter[int] = Counter()
        self.last: dict[int, float] = {}

    def compute(self, tokens: list[int], first: int) -> np.ndarray:
        """Logits of the last of `tokens`, whose ids begin with `first`."""
        ids = range(first, first + len(tokens))
        answer = self.model(
            torch.tensor([tokens]), past_key_values=self.cache, position_ids=torch.tensor([list(ids)]),
            output_attentions=True,
        )  # fmt: skip
        self.live += ids
        for row in range(len(tokens)):
            shares = np.mean([answer.attentions[layer][0, :, row].double().mean(0).numpy() for layer in LAYERS], axis=0)
            self.last = dict(zip(self.live, shares.tolist(), strict=True))
            self.total.update(self.last)
        return torch.log_softmax(answer.logits[0, -1], dim=-1).numpy()

    def forget(self, rank: dict[int, float], total: int) -> None:
        """Candidates of the lowest rank, down to the budget."""
        candidates = [token for token in self.live if SINKS <= token < total - RECENT]
        gone = sorted(candidates, key=rank.__getitem__)[: len(self.live) - BUDGET]
        kept = [index for index, token in enumerate(self.live) if token not in gone]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        self.live = [self.live[index] for index in kept]

    def key_norms(self) -> dict[int, float]:
        """Negative, so that the longest key goes first."""
        norms = np.mean([self.cache.layers[layer].keys[0].norm(dim=2).mean(0).numpy() for layer in LAYERS], axis=0)
        return dict(zip(self.live, (-norms).tolist(), strict=True))


@torch.inference_mode()
def lived(model: LlamaForCausalLM, policy: str) -> Trace:
    """What a faithful engine would leave."""
    trace = Trace(Request(text_of(PROMPT), TOKENS, {"policy": policy, **OPTIONS}), text_of(TOKENS))
    loop, decided = Loop(model), -INTERVAL
    for step in range(TOKENS):
        total = PROMPT + step - 1
        if step and len(loop.live) > BUDGET and total - decided >= INTERVAL:
            ranks = {"h2o": loop.total, "tova": loop.last}
            loop.forget(ranks[policy] if policy in ranks else loop.key_norms(), total)
            decided = total
        tokens = trace.generated[step - 1 : step] if step else trace.request.prompt
        found = loop.compute(tokens, total if step else 0)
        trace.top.append({int(token): float(found[token]) for token in np.argsort(found)[-5:]})
        trace.live.append(list(loop.live))
    return trace


@pytest.mark.parametrize("window", [2, 8, 64])
@pytest.mark.parametrize("policy", ["h2o", "tova", "key_norm"])
def test_a_faithful_engine_chose_what_the_dense_pass_would_choose(
    model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    window: int,
) -> None:
    monkeypatch.setattr(choices, "WINDOW", window)
    trace = lived(model, policy)
    found = compare(trace, Reference(model))
    assert found.largest < 1e-4
    assert found.wrong_live_sets == 0
    assert found.expected == found.forgotten == PROMPT + TOKENS - 1 - len(trace.live[-1]) > 0


def swapped(trace: Trace, step: int, gone: int, back: int) -> Trace:
    """From a step on, `gone` is dead and `back` lives."""
    for index in range(step, len(trace.live)):
        trace.live[index] = sorted({*trace.live[index], back} - {gone})
    return trace


def test_another_choice_shows_as_such(model: LlamaForCausalLM) -> None:
    """At the last decision one token is forgotten instead of another: the budget rule holds, the scores disagree."""
    trace = lived(model, "h2o")
    step = max(step for step in range(1, TOKENS) if len(trace.live[step]) <= len(trace.live[step - 1]))
    (back, *_) = sorted(set(trace.live[step - 1]) - set(trace.live[step]))
    gone = next(token for token in trace.live[step] if SINKS <= token != back)
    found = compare(swapped(trace, step, gone, back), Reference(model))
    assert found.wrong_live_sets == 0
    assert found.expected < found.forgotten


@pytest.mark.parametrize("what", ["a sink is dead", "one more is dead", "one is dead too early"])
def test_live_sets_that_no_policy_can_lead_to_show(model: LlamaForCausalLM, what: str) -> None:
    trace = lived(model, "h2o")
    step = next(step for step in range(1, TOKENS) if len(trace.live[step]) <= len(trace.live[step - 1]))
    if what == "a sink is dead":
        swapped(trace, step, 0, next(token for token in trace.live[step - 1] if token not in trace.live[step]))
    elif what == "one more is dead":
        swapped(trace, step, trace.live[step][SINKS], trace.live[step][0])
    else:
        gone = next(token for token in trace.live[step - 1] if token not in trace.live[step])
        trace.live[step - 1] = [token for token in trace.live[step - 1] if token != gone]
    assert compare(trace, Reference(model)).wrong_live_sets > 0
