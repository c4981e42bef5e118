"""What fits, by formula: the published block counts, and laws that any plan obeys."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.cli import EXIT_REFUSED, main
from vtoken.core.capacity import (
    GPU_MEMORY_BYTES,
    PRESETS,
    Machine,
    ModelShape,
    Traffic,
    capacity,
)
from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import ConfigError, UnsupportedError

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
LLAMA = PRESETS["llama-3.1-8b"]
LLAMA_CONFIG = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_llama_weighs_what_is_published() -> None:
    assert LLAMA.kv_bytes_per_token == 128 * 1024
    assert LLAMA.weights_bytes / 1e9 == pytest.approx(16.06, abs=0.005)
    assert ModelShape.from_config(LLAMA_CONFIG) == LLAMA


@pytest.mark.parametrize(("share", "published"), [(0.35, 5_427), (0.50, 11_519)])
def test_an_h100_has_the_published_number_of_blocks(share: float, published: int) -> None:
    """Two numbers, one fitted constant: the second one is a prediction."""
    blocks = Machine(GPU_MEMORY_BYTES["h100"], share).blocks(LLAMA.weights_bytes, 16 * LLAMA.kv_bytes_per_token)
    assert blocks == pytest.approx(published, rel=0.02)


def test_the_prepared_model_weighs_what_its_files_weigh(model_dir) -> None:
    raw = json.loads((model_dir / "config.json").read_text())
    found = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    assert ModelShape.from_config(raw).weights_bytes == pytest.approx(found, rel=0.001)


def test_a_model_of_another_kind_is_refused_by_the_field_that_says_so() -> None:
    with pytest.raises(UnsupportedError, match="num_local_experts = 8"):
        ModelShape.from_config({**LLAMA_CONFIG, "num_local_experts": 8})
    with pytest.raises(ConfigError, match="vocab_size"):
        ModelShape.from_config({**LLAMA_CONFIG, "vocab_size": None})
    with pytest.raises(ConfigError, match="torch_dtype"):
        ModelShape.from_config({**LLAMA_CONFIG, "torch_dtype": "float8"})


machines = st.builds(Machine, st.integers(0, 1 << 40), st.floats(0, 1), st.integers(0, 1 << 34))
sizes = st.integers(1, 1 << 40)


@given(machine=machines, weights=st.integers(0, 1 << 38), block=sizes)
def test_blocks_never_take_more_bytes_than_there_are(machine: Machine, weights: int, block: int) -> None:
    blocks = machine.blocks(weights, block)
    assert blocks >= 0
    assert not blocks or blocks * block + weights + machine.overhead_bytes <= machine.share * machine.memory_bytes
    left = machine.share * machine.memory_bytes - weights - machine.overhead_bytes
    assert (blocks + 1) * block > left - 1


@given(machine=machines, weights=st.integers(0, 1 << 38), block=sizes, more=st.integers(0, 1 << 38))
def test_more_memory_is_never_fewer_blocks_and_more_weights_never_more(machine, weights, block, more) -> None:
    blocks = machine.blocks(weights, block)
    assert replace(machine, memory_bytes=machine.memory_bytes + more).blocks(weights, block) >= blocks
    assert machine.blocks(weights + more, block) <= blocks


ratios = st.floats(0.01, 1.0)
traffic = st.builds(Traffic, st.integers(1, 30_000), st.integers(1, 30_000), st.one_of(st.none(), st.integers(1, 8192)))


def keeping(ratio: float, **others) -> VTokenConfig:
    return VTokenConfig(policy=PolicyOptions(policy="random", keep_ratio=ratio, **others))


@given(blocks=st.integers(0, 20_000), size=st.sampled_from([16, 32]), load=traffic, ratio=ratios, chunks=st.booleans())
def test_what_is_promised_lies_in_the_pool(blocks, size, load, ratio, chunks) -> None:
    found = capacity(blocks, size, load, keeping(ratio, between_chunks=chunks))
    assert found.requests_whole * found.whole_blocks <= max(blocks - 1, 0)
    prompt = max(found.prompt_blocks - found.held_blocks, 0) if found.requests_reclaimed else 0
    taken = found.requests_reclaimed * found.held_blocks + prompt
    assert taken <= max(blocks - 1 - found.headroom_blocks, 0)


@given(blocks=st.integers(0, 20_000), load=traffic, ratio=ratios, less=ratios, more=st.integers(0, 5_000))
def test_forgetting_more_or_owning_more_never_serves_fewer(blocks, load, ratio, less, more) -> None:
    found = capacity(blocks, 16, load, keeping(ratio))
    assert capacity(blocks, 16, load, keeping(min(less, ratio))).held_blocks <= found.held_blocks
    assert capacity(blocks + more, 16, load, keeping(ratio)).requests_reclaimed >= found.requests_reclaimed


def test_the_whole_prompt_is_paid_for_once_and_not_at_all_between_chunks() -> None:
    """100 usable blocks; a prompt of 64 blocks shrinks to 16 tokens and 3 to grow by, 2 blocks."""
    options = PolicyOptions(policy="random", budget_tokens=16, protect_sinks=1, protect_recent=4, interval_tokens=2)
    load = Traffic(1024, 16, chunk_tokens=64)
    whole = capacity(103, 16, load, VTokenConfig(policy=options))
    assert (whole.headroom_blocks, whole.prompt_blocks, whole.held_blocks) == (2, 64, 2)
    assert whole.requests_reclaimed == 1 + (100 - 64) // 2
    chunked = capacity(103, 16, load, VTokenConfig(policy=replace(options, between_chunks=True)))
    assert (chunked.prompt_blocks, chunked.requests_reclaimed) == (5, (100 - 3) // 2)


def test_the_command_prints_the_plan_and_refuses_nonsense(capsys) -> None:
    words = ["plan", "llama-3.1-8b", "--memory-share", "0.35", "0.5", "--policy", "random", "--keep-ratio", "0.5"]
    assert main([*words, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [one["memory_share"] for one in plans] == [0.35, 0.5]
    assert 1.8 < plans[1]["requests_reclaimed"] / plans[1]["requests_whole"] <= 2
    assert main(words) == 0
    assert f"{plans[1]['blocks']:,}" in capsys.readouterr().out
    for wrong, word in ((["--block-size", "0"], "block-size"), (["--policy", "unheard"], "unheard")):
        assert main([*words, *wrong]) == EXIT_REFUSED
        assert word in capsys.readouterr().err
    assert main(["plan", "nowhere"]) == EXIT_REFUSED
    assert "smollm2-135m" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["serve/one-gpu.yaml", "serve/fleet-h100.yaml"])
def test_the_arithmetic_in_the_deployment_files_is_the_plans(name: str, capsys) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    (command,) = re.findall(r"`vtoken (plan .*)`", text)
    assert main([*command.split(), "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    for said in (
        f"{plan['blocks']:,} blocks",
        f"{plan['requests_whole']} requests",
        f"or {plan['requests_reclaimed']} under",
    ):
        assert said in text
