"""Policies that look at attention or keys, on the real model: the mass is the model's own; texts stay comparable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.test_engine import engine, prompts
from vtoken.core.policies import load_policy, needs_of, policy_names
from vtoken.core.scores import Needs
from vtoken.device.scorer import chosen_layers
from vtoken.engine.offline import Completion, OfflineEngine

pytestmark = pytest.mark.integration

LAYERS = 3
SCORED = [name for name in policy_names() if name != "none" and needs_of(load_policy(name)) is not Needs.NOTHING]


def full_attention(model_dir: Path, token_ids: list[int]) -> np.ndarray:
    """Mass of every token by transformers' eager attention: sum over queries, mean over heads and the chosen layers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        weights = model(torch.tensor([token_ids]), output_attentions=True).attentions
    chosen = map(int, chosen_layers([str(index) for index in range(len(weights))], LAYERS))
    mass: np.ndarray = torch.stack([weights[layer][0].double().mean(0).sum(0) for layer in chosen]).mean(0).numpy()
    return mass


@pytest.mark.parametrize("chunk", [2048, 48])
def test_accumulated_mass_is_that_of_full_attention_weights(model_dir: Path, chunk: int) -> None:
    """H2O's sums after a prompt (whole, or in chunks) and 70 decoded tokens, against transformers' own weights."""
    config = {"policy": {"policy": "h2o", "budget_tokens": 2000}, "score_layers": LAYERS, "score_window": 32}
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": max(chunk, 8)}
    with engine(model_dir, config, **chunked) as one:
        name = one.add(prompts(1)[0] * 9, max_tokens=72, ignore_eos=True)
        token_ids: tuple[int, ...] = ()
        while len(token_ids) < 71:
            for _, completion, _ in one.step():
                token_ids = completion.token_ids
        (found,) = one.worker("vtoken_attention").values()
        prompt = one.scheduler().requests
        prompt_ids = next(list(request.prompt_token_ids) for key, request in prompt.items() if key.startswith(name))
        while one.busy:
            one.step()
    expected = full_attention(model_dir, prompt_ids + list(token_ids[:70]))
    mass = np.array(found["total"])
    assert found["queries"] == len(mass) == len(expected) > 150
    np.testing.assert_allclose(mass, expected, rtol=1e-2, atol=1e-4)
    top = len(mass) // 4
    assert len(set(np.argsort(mass)[-top:]) & set(np.argsort(expected)[-top:])) >= 0.99 * top


@pytest.fixture(scope="module")
def scored_texts(model_dir: Path) -> dict[str, Any]:
    """Two prompts under each scored policy: hidden only, filled at once, evacuated later; the strict reader.

    They are long enough that each policy forgets, a whole page too.
    """
    modes: dict[str, dict[str, Any]] = {
        "naive": {"variant": "naive"}, "eager": {}, "lazy": {"relocation": "lazy", "headroom_blocks": 16},
    }  # fmt: skip
    return {mode: run_policies(model_dir, settings) for mode, settings in modes.items()}


def run_policies(model_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """One engine, all policies together, for a request names its own: texts, and late in them the tokens kept."""
    with engine(model_dir, {"reader": "strict", "check_moves": 1.0, **settings}, num_gpu_blocks_override=400) as one:
        names = {policy: [ask(one, policy, prompt) for prompt in prompts(5)[3:]] for policy in SCORED}
        texts: dict[str, Completion] = {}
        kept: dict[str, list[int]] = {}
        while one.busy:
            texts |= {name: completion for name, completion, _ in one.step()}
            if not kept and min(len(completion.token_ids) for completion in texts.values()) >= 50:
                kept = {key: row["live"] for key, row in one.worker("vtoken_rows").items()}
    lives = {name: live for key, live in kept.items() for name in texts if key.startswith(f"{name}-")}
    return {policy: [(texts[name], lives[name]) for name in asked] for policy, asked in names.items()}


def ask(one: OfflineEngine, policy: str, prompt: str) -> str:
    """A request that keeps 48 tokens."""
    options = {"policy": policy, "budget_tokens": 48, "interval_tokens": 12, "protect_recent": 8}
    return one.add(prompt, max_tokens=60, ignore_eos=True, extra_args={"vtoken": options})


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("policy", SCORED)
def test_scores_do_not_depend_on_where_tokens_lie(scored_texts: dict[str, Any], mode: str, policy: str) -> None:
    assert scored_texts[mode][policy] == scored_texts["naive"][policy]
    assert any(len(live) <= max(live) for _, live in scored_texts[mode][policy]), "nothing was evicted"


def test_policies_differ(scored_texts: dict[str, Any]) -> None:
    """Each looks at something else; those of recent attention may agree on texts as short as these."""
    texts = [tuple(one.text for one, _ in done) for done in scored_texts["eager"].values()]
    assert len(set(texts)) >= len(texts) // 2
