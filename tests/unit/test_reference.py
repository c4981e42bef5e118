"""The dense reference of `vtoken bench identity`, against slower and simpler ones, on a tiny random model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from vtoken.bench.prompts import Request
from vtoken.bench.reference import Reference, Tolerance, compare, live_sets, mask_of, one_key_less
from vtoken.bench.traces import Trace
from vtoken.core.config import PolicyOptions

VOCABULARY = 96
OPTIONS = {
    name: {"policy": name, "budget_tokens": 12, "protect_sinks": 2, "protect_recent": 4, "interval_tokens": 3}
    for name in ("streaming_llm", "random")
}


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, attn_implementation="eager", initializer_range=0.2)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


def text_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()


def live_by_hand(prompt: int, steps: int) -> list[list[int]]:
    """StreamingLLM with OPTIONS, from its description: 2 sinks and the last tokens, 12 after each decision."""
    seen, live, decided = [list(range(prompt))], list(range(prompt)), None
    for query in range(prompt, prompt + steps - 1):
        if len(live) > 12 and (decided is None or query - decided >= 3):
            live, decided = live[:2] + live[-10:], query
        live = [*live, query]
        seen.append(live)
    return seen


@pytest.mark.parametrize("prompt", [1, 5, 12, 13, 40])
def test_live_sets_follow_the_description_of_the_budget_rule(prompt: int) -> None:
    found = live_sets(text_of(prompt), PolicyOptions().override(OPTIONS["streaming_llm"]), 30)
    assert [ids.tolist() for ids in found] == live_by_hand(prompt, 30)


def test_without_a_policy_every_query_sees_every_token(model: LlamaForCausalLM) -> None:
    text = text_of(20)
    seen = live_sets(text[:8], PolicyOptions(), 13)
    assert mask_of(seen, 20).tolist() == np.tril(np.ones((20, 20), bool)).tolist()
    with torch.inference_mode():
        plain = torch.log_softmax(model(torch.tensor([text])).logits[0, 7:], dim=-1).numpy()
    np.testing.assert_allclose(Reference(model).log_probs(text, seen), plain, atol=1e-5)


@pytest.mark.parametrize("policy", ["streaming_llm", "random"])
def test_one_masked_pass_is_a_decode_loop_that_deletes_keys(model: LlamaForCausalLM, policy: str) -> None:
    """Step by step, with a cache from which forgotten tokens are cut out; positions stay as they were."""
    text, prompt = text_of(45), 15
    seen = live_sets(text[:prompt], PolicyOptions().override(OPTIONS[policy]), len(text) - prompt + 1)
    cache, held, slow = DynamicCache(), [], []
    with torch.inference_mode():
        for begin, end in [(0, prompt), *((query, query + 1) for query in range(prompt, len(text)))]:
            kept = [index for index, token in enumerate(held) if token in set(seen[len(slow)].tolist())]
            for layer in cache.layers:
                if layer.keys is not None and held:
                    layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
            held = [held[index] for index in kept] + list(range(begin, end))
            assert held == seen[len(slow)].tolist()
            positions = torch.arange(begin, end)[None]
            found = model(torch.tensor([text[begin:end]]), past_key_values=cache, position_ids=positions)
            slow.append(torch.log_softmax(found.logits[0, -1], dim=-1).numpy())
    np.testing.assert_allclose(Reference(model).log_probs(text, seen), np.stack(slow), atol=1e-4)


def tolerance(nats: float) -> Tolerance:
    return Tolerance(nats, nats, nats)


def traced(model: LlamaForCausalLM, policy: str) -> Trace:
    """A trace that a faithful engine would leave: 30 tokens, the five likeliest of each step."""
    request = Request(text_of(20), 30, OPTIONS[policy])
    trace = Trace(request, text_of(30))
    seen = live_sets(request.prompt, PolicyOptions().override(request.options), 30)
    for row, ids in zip(Reference(model).log_probs([*request.prompt, *trace.generated[:-1]], seen), seen, strict=True):
        best = np.argsort(row)[-5:]
        trace.top.append({int(token): float(row[token]) for token in best})
        trace.live.append(ids.tolist())
    return trace


@pytest.mark.parametrize("policy", ["streaming_llm", "random"])
def test_a_faithful_trace_agrees_and_a_wrong_one_does_not(model: LlamaForCausalLM, policy: str) -> None:
    reference, trace = Reference(model), traced(model, policy)
    found = compare(trace, reference)
    assert found.agrees(tolerance(1e-5))
    assert (found.steps, found.wrong_live_sets, len(found.differences)) == (30, 0, 30 * 6)
    assert found.forgotten == 49 - len(trace.live[-1]) > 0
    assert not compare(trace, reference, one_key_less).agrees(tolerance(1e-3)), "a hidden key must show"
    trace.live[17] = trace.live[17][1:]
    assert compare(trace, reference).wrong_live_sets == 1
    assert not compare(trace, reference).agrees(tolerance(1e9))


def test_a_likelier_token_that_the_engine_does_not_name_shows(model: LlamaForCausalLM) -> None:
    trace = traced(model, "random")
    best = max(trace.top[9], key=trace.top[9].__getitem__)
    del trace.top[9][best]
    assert compare(trace, Reference(model)).largest > 1e-3
