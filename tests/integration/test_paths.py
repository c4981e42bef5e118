"""Every engine path together: chunked prefill, prefix cache, priorities, n > 1, logprobs, stop strings, grammars.

One mixed load, then a grammar and seeded sampling by themselves, run by unmodified vLLM, by the idle plugin,
and under eviction with and without relocation.
All of it in float32 and with the same arrival order, so that everything but the placement of tokens is equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_engine import POLICY, engine, prompts

pytestmark = pytest.mark.integration

CHUNKED = {
    "max_num_batched_tokens": 48, "enable_chunked_prefill": True, "enable_prefix_caching": True,
    "scheduling_policy": "priority", "num_gpu_blocks_override": 300, "max_num_seqs": 8,
}  # fmt: skip


def mixed_load() -> list[tuple[str, Any, int]]:
    """(prompt, sampling, priority); prompts of 20 to 150 tokens, so that chunks end inside blocks."""
    from vllm import SamplingParams

    def greedy(**more: Any) -> Any:
        return SamplingParams(temperature=0.0, **{"max_tokens": 70, "ignore_eos": True, **more})

    texts = [text * (1 + index % 3) for index, text in enumerate(prompts(12))]
    return [
        (texts[0], greedy(), 0),
        (texts[1], greedy(logprobs=3), 1),
        (texts[2], greedy(prompt_logprobs=2, max_tokens=50), 0),
        (texts[3], greedy(), 2),
        (texts[4], SamplingParams(temperature=0.0, max_tokens=80, stop=["the", "The"]), 0),
        (texts[6], greedy(repetition_penalty=1.2, presence_penalty=0.3), 0),
        (texts[7], greedy(frequency_penalty=0.5), -1),
        (texts[0], greedy(), 0),
        (texts[8], greedy(max_tokens=1), 0),
        (texts[9], greedy(min_tokens=30), 5),
    ]  # fmt: skip


def seeded_load() -> list[tuple[str, Any, int]]:
    """Three samples of one short prompt: vLLM 0.32 on CPU dies of a seed whose prompt is computed in chunks."""
    from vllm import SamplingParams

    params = SamplingParams(n=3, temperature=0.8, top_p=0.9, seed=7, max_tokens=70, ignore_eos=True)
    return [("Once upon a time", params, 0)]


def structured_load() -> list[tuple[str, Any, int]]:
    """A grammar, by itself: vLLM compiles it in a thread, so in a mixed batch its place would depend on time."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex=r"[a-z]{4} [0-9]{3} [a-z]{30,40}")
    return [(prompts(6)[5] * 3, SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=grammar), 0)]


def essence(outputs: list[Any]) -> list[Any]:
    """What a client sees: texts, token ids, reasons, the ranked log-probabilities."""
    return [
        (
            [(one.text, tuple(one.token_ids), one.finish_reason, one.stop_reason, ranks(one.logprobs))
             for one in output.outputs],
            ranks(output.prompt_logprobs),
        )
        for output in outputs
    ]  # fmt: skip


def ranks(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [None if at is None else {token: value.logprob for token, value in at.items()} for at in logprobs]


def same(one: Any, other: Any) -> bool:
    """Equal throughout; log-probabilities within what two runs of unmodified vLLM differ by (seen: 1e-4)."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def run(model: Path, config: dict[str, Any] | None, **kwargs: Any) -> tuple[list[Any], Any]:
    with engine(model, config, **{**CHUNKED, **kwargs}) as one:
        found = [essence(one.outputs(load())) for load in (mixed_load, structured_load, seeded_load)]
        return found, one.snapshots.snapshot()


def test_the_idle_plugin_changes_nothing_on_any_path(model_dir: Path) -> None:
    expected, _ = run(model_dir, None, block_size=32)
    found, _ = run(model_dir, {}, block_size=32)
    assert same(found, expected)


def test_relocation_changes_nothing_on_any_path(model_dir: Path) -> None:
    evicting = {"policy": {**POLICY, "budget_tokens": 40}, "reader": "strict", "check_moves": 1.0}
    hidden, naive = run(model_dir, {**evicting, "variant": "naive"})
    for relocation in ("eager", "lazy"):
        moved, last = run(model_dir, {**evicting, "relocation": relocation, "headroom_blocks": 24})
        assert same(moved, hidden), relocation
        assert last.moves_total > 0
        assert last.blocks_released_total > naive.blocks_released_total
        assert last.tokens_evicted_total == naive.tokens_evicted_total > 0
