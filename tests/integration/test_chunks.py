"""Eviction between the chunks of a prompt: prompts larger than the pool, and a prefix cache that is not poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_engine import Watch, engine, prompts
from vtoken.core.config import PolicyOptions

pytestmark = pytest.mark.integration

SIZE, CHUNK, POOL = 16, 64, 24
POLICY = {"policy": "random", "budget_tokens": 96, "interval_tokens": 16, "protect_recent": 16, "between_chunks": True}
CHUNKED = {"max_num_batched_tokens": CHUNK, "enable_chunked_prefill": True, "max_model_len": 1024, "max_num_seqs": 4}


def long_prompts(count: int, tokens: int) -> list[list[int]]:
    """Prompts of exactly so many tokens: chunks end at the same places in every run."""
    return [
        [(7 * index + 3 * position * position) % 40000 + 100 for position in range(tokens)] for index in range(count)
    ]


def texts(
    model: Path, settings: dict[str, Any], given: Sequence[list[int]], blocks: int, **more: Any
) -> tuple[Any, Watch]:
    """Each prompt by itself, one after the other: then a chunk is as long as it may be."""
    watch = Watch()
    config = {"policy": POLICY, "reader": "strict", "check_moves": 1.0, "poison_released": True, **settings}
    with engine(model, config, num_gpu_blocks_override=blocks, **{**CHUNKED, **more}) as one:
        found = [one.run([prompt], watch, max_tokens=40, ignore_eos=True)[0].token_ids for prompt in given]
        one.worker("vtoken_check")
    return found, watch


def test_a_prompt_of_more_than_twice_the_pool_completes_with_the_text_of_a_large_pool(model_dir: Path) -> None:
    given = long_prompts(2, 60 * SIZE)
    hidden, _ = texts(model_dir, {"variant": "naive"}, given, blocks=200)
    reclaimed, watch = texts(model_dir, {}, given, blocks=POOL)
    assert reclaimed == hidden
    peak = PolicyOptions(**POLICY).peak_tokens(60 * SIZE, CHUNK)
    assert watch.peak_blocks <= -(-peak // SIZE) < POOL < 60


def test_more_of_them_than_fit_wait_for_each_other_and_all_complete(model_dir: Path) -> None:
    config = {"policy": POLICY, "check_moves": 1.0}
    with engine(model_dir, config, num_gpu_blocks_override=POOL, enable_prefix_caching=True, **CHUNKED) as one:
        done = one.run(long_prompts(5, 50 * SIZE), max_tokens=40, ignore_eos=True)
        assert [len(completion.token_ids) for completion in done] == [40] * 5
        last = one.settle()
    assert last.free_blocks + last.reserved_blocks == last.capacity_blocks
    assert last.move_check_failures_total == 0


def test_chunks_computed_after_an_eviction_do_not_enter_the_prefix_cache(model_dir: Path) -> None:
    """The first request forgets after its second chunk. One that keeps everything then finds two chunks of five."""
    from vllm import SamplingParams

    (prompt,) = long_prompts(1, 5 * CHUNK)
    forgetting = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, extra_args={"vtoken": POLICY})
    keeping = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers = {}
    for cached in (False, True):
        with engine(model_dir, {}, num_gpu_blocks_override=200, enable_prefix_caching=cached, **CHUNKED) as one:
            first = one.outputs([(prompt, forgetting, 0)])[0]
            second = one.outputs([(prompt, keeping, 0)])[0]
            assert one.snapshots.snapshot().tokens_evicted_total > 0
            assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 2 * CHUNK if cached else 0)
            answers[cached] = second.outputs[0].text
    assert answers[True] == answers[False]


@pytest.mark.parametrize("settings", [{"variant": "naive"}, {"relocation": "lazy"}])
def test_vllm_refuses_a_pool_for_which_only_hole_filling_keeps_prompts_small_enough(
    model_dir: Path, settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"max seq len \(1024\)"):
        texts(model_dir, settings, [], blocks=POOL)


def test_short_prompts_are_as_without_the_option(model_dir: Path) -> None:
    """Nothing is above its target between the chunks, so nothing changes."""
    given = [text * 2 for text in prompts(4)]
    found = []
    for between in (False, True):
        policy = {**POLICY, "budget_tokens": 200, "between_chunks": between}
        with engine(model_dir, {"policy": policy}, num_gpu_blocks_override=200, **CHUNKED) as one:
            found.append(one.run(given, max_tokens=30, ignore_eos=True))
    assert found[0] == found[1]
