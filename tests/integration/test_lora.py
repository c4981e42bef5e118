"""LoRA adapters: the idle plugin changes nothing, adapters share no cached block, moves change no text.

Two random adapters on the query and value projections. vLLM's CPU kernels give requests without an adapter the
last adapter slot, so one slot more than there are adapters is asked for: it holds zeros.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.integration.test_engine import POLICY, engine, prompts
from vtoken.engine.offline import OfflineEngine

pytestmark = pytest.mark.integration

RANK = 8
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK, "num_gpu_blocks_override": 400}
NAMES = (None, "a", "b")

Ask = tuple[str | None, str]
"""Adapter and prompt."""


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Any]:
    """LoRARequests by name, and None for the model as it is."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("adapters")
    written = {name: write_adapter(model_dir, folder / name, seed) for seed, name in enumerate(NAMES) if name}
    return {None: None, **{name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(written.items(), 1)}}


def write_adapter(model_dir: Path, folder: Path, seed: int) -> Path:
    """A random adapter in PEFT's format, strong enough to change every text."""
    model = json.loads((model_dir / "config.json").read_text())
    hidden = model["hidden_size"]
    head = model.get("head_dim") or hidden // model["num_attention_heads"]
    widths = {"q_proj": head * model["num_attention_heads"], "v_proj": head * model["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) / hidden**0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=generator) * 0.3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none",
        "target_modules": list(widths), "base_model_name_or_path": str(model_dir),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def complete(one: OfflineEngine, adapters: dict[str | None, Any], asked: list[Ask], tokens: int) -> list[Any]:
    """Complete requests together, greedily; vLLM's outputs in their order."""
    names = [one.add(prompt, lora=adapters[name], max_tokens=tokens, ignore_eos=True) for name, prompt in asked]
    done: dict[str, Any] = {}
    while one.busy:
        done |= {output.request_id: output for output in one.advance()}
    one.settle()
    return [done[name] for name in names]


def texts(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_the_idle_plugin_changes_nothing_with_any_adapter(model_dir: Path, adapters: dict[str | None, Any]) -> None:
    asked = [(adapter, prompt) for prompt in prompts(4) for adapter in NAMES]
    found = {}
    for config in (None, {}):
        with engine(model_dir, config, block_size=32, **LORA) as one:
            found[config is None] = texts(complete(one, adapters, asked, tokens=24))
    assert found[False] == found[True]
    for at in range(0, len(asked), len(NAMES)):
        assert len(set(found[True][at : at + len(NAMES)])) == len(NAMES), "an adapter changed no text"


VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "naive": ({"variant": "naive"}, False),
    "eager": ({}, True),
    "lazy": ({"relocation": "lazy"}, True),
}
"""Settings, and whether prefixes are cached."""


@pytest.fixture(scope="module")
def runs(model_dir: Path, adapters: dict[str | None, Any]) -> dict[str, tuple[list[Any], Any]]:
    """One prompt under every adapter, one after the other; then this and a second with the same beginning, together."""
    shared = "The committee met in the old library to discuss how printed texts become electronic ones. " * 6
    asked = [(adapter, f"{shared}Question {i}: what next? Answer:") for i in range(2) for adapter in NAMES]
    found = {}
    for name, (settings, caching) in VARIANTS.items():
        config = {"policy": POLICY, "reader": "strict", "check_moves": 1.0, "headroom_blocks": 16, **settings}
        with engine(model_dir, config, enable_prefix_caching=caching, **LORA) as one:
            alone = [complete(one, adapters, [each], tokens=36)[0] for each in asked[: len(NAMES)]]
            together = complete(one, adapters, asked, tokens=36)
            found[name] = ([*alone, *together], one.snapshots.snapshot())
    return found


@pytest.mark.parametrize("name", ["eager", "lazy"])
def test_neither_moves_nor_the_cache_change_an_adapters_text(runs: dict[str, Any], name: str) -> None:
    (expected, hidden), (found, last) = runs["naive"], runs[name]
    assert texts(found) == texts(expected)
    assert last.moves_total > 0
    assert last.blocks_released_total > hidden.blocks_released_total
    assert last.tokens_evicted_total == hidden.tokens_evicted_total > 0


@pytest.mark.parametrize("name", ["eager", "lazy"])
def test_an_adapter_hits_only_what_it_computed_itself(runs: dict[str, Any], name: str) -> None:
    hits = [output.num_cached_tokens for output in runs[name][0]]
    assert hits[: len(NAMES)] == [0] * len(NAMES), "the first request of an adapter hit another's blocks"
    assert min(hits[len(NAMES) :]) > 64, "no prefix was shared: the test shows nothing"
