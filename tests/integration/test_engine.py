"""The real engine, the real model: identity, conservation and blocks that come back.

Identity is compared in float32 or at equal batch composition: unmodified vLLM's bf16 output depends
on the batch (docs/substrate.md). One engine at a time; each prompt set is small on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vtoken.core.config import VTokenConfig
from vtoken.core.telemetry import Snapshot
from vtoken.engine.offline import Completion, OfflineEngine

pytestmark = pytest.mark.integration

SMALL = {"max_model_len": 1024, "max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 28, "enable_prefix_caching": False}
POLICY = {"policy": "random", "budget_tokens": 64, "protect_recent": 16, "interval_tokens": 16}
WORDS = ["river", "stone", "lamp", "garden", "winter", "bread", "silver", "cloud", "engine", "letter"]


def prompts(count: int) -> list[str]:
    """Short prompts of different lengths."""
    return [
        f"Story {i} about the {WORDS[i % 10]} and the {WORDS[(3 * i + 1) % 10]}. " + "Once upon a time " * (i % 5 + 1)
        for i in range(count)
    ]


@contextmanager
def engine(model: Path, config: dict[str, Any] | None, **kwargs: Any) -> Iterator[OfflineEngine]:
    """An engine that is closed whatever happens, with every block back and every table gone."""
    settings = None if config is None else VTokenConfig.from_mapping(config)
    running = OfflineEngine(str(model), settings, **{"dtype": "float32", "block_size": 16, **SMALL, **kwargs})
    try:
        yield running
        if settings is not None:
            assert_all_back(running)
    finally:
        running.close()


def assert_all_back(running: OfflineEngine) -> None:
    """free + reserved = capacity, no table is left, no move failed its check."""
    last = running.settle()
    assert last.free_blocks + last.reserved_blocks == last.capacity_blocks
    worker = running.worker("vtoken_check")
    assert worker["tracked_requests"] == worker["inflight_plans"] == 0
    assert worker["move_check_failures_total"] == 0
    manager = running.scheduler().kv_cache_manager.coordinator.single_type_managers[0]
    assert not manager._extra
    assert not manager._growth
    assert not manager.req_to_blocks


class Watch:
    """What a run looked like from outside."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def __call__(self, snapshot: Snapshot) -> None:
        self.seen.append(snapshot)
        states = (snapshot.free_blocks, snapshot.reserved_blocks, snapshot.private_blocks, snapshot.shared_blocks)
        assert sum(states) == snapshot.capacity_blocks, "I6"
        assert snapshot.referenced_blocks >= snapshot.private_blocks + snapshot.shared_blocks, "some request has each"

    @property
    def peak_blocks(self) -> int:
        return max(s.capacity_blocks - s.free_blocks for s in self.seen)

    @property
    def mean_waste(self) -> float:
        busy = [s.waste_ratio for s in self.seen if s.tokens_evicted_total]
        return sum(busy) / len(busy)


def test_idle_plugin_gives_exactly_what_unmodified_vllm_gives(model_dir: Path) -> None:
    given = prompts(32)
    with engine(model_dir, None, block_size=32) as unmodified:
        expected = unmodified.run(given, max_tokens=24, ignore_eos=True)
    with engine(model_dir, {}, block_size=32) as idle:
        found = idle.run(given, max_tokens=24, ignore_eos=True)
    assert found == expected


@pytest.fixture(scope="module")
def runs(model_dir: Path) -> dict[str, tuple[list[Completion], Watch, Snapshot]]:
    """16 prompts under the same evictions: hidden only, filled eagerly, evacuated lazily; strict and auto readers."""
    variants: dict[str, dict[str, Any]] = {
        "naive": {"variant": "naive", "reader": "strict"},
        "eager": {"reader": "strict"},
        "lazy": {"reader": "strict", "relocation": "lazy", "headroom_blocks": 16},
        "auto": {"reader": "auto"},
    }
    found = {}
    for name, settings in variants.items():
        watch = Watch()
        config = {"policy": POLICY, "check_moves": 1.0, "poison_released": True, **settings}
        with engine(model_dir, config, num_gpu_blocks_override=400) as one:
            texts = one.run(prompts(16), watch, max_tokens=160, ignore_eos=True)
            found[name] = (texts, watch, one.snapshots.snapshot())
    return found


@pytest.mark.parametrize("variant", ["eager", "lazy"])
def test_the_text_does_not_depend_on_where_tokens_lie(runs: dict[str, Any], variant: str) -> None:
    assert runs[variant][0] == runs["naive"][0]
    assert runs[variant][2].tokens_evicted_total == runs["naive"][2].tokens_evicted_total > 0


def test_dense_rows_on_the_native_kernel_give_the_same_text_in_float32(runs: dict[str, Any]) -> None:
    same = sum(a == b for a, b in zip(runs["auto"][0], runs["naive"][0], strict=True))
    assert same >= 15  # two kernels round differently: one near-tie in 16 x 160 tokens is allowed


@pytest.mark.parametrize("variant", ["eager", "lazy", "auto"])
def test_memory_comes_back_while_requests_decode(runs: dict[str, Any], variant: str) -> None:
    _, watch, last = runs[variant]
    assert last.blocks_released_total > 0
    assert last.moves_total > 0
    assert last.move_checks_total > 0
    assert watch.peak_blocks <= 0.75 * runs["naive"][1].peak_blocks
    assert watch.mean_waste <= 0.5 * runs["naive"][1].mean_waste


def test_eager_rows_stay_dense_and_each_evicted_token_costs_at_most_one_move(runs: dict[str, Any]) -> None:
    last = runs["eager"][2]
    assert last.moves_total <= last.tokens_evicted_total
    assert last.plans_deferred_total == 0


@pytest.fixture(scope="module", params=["eager", "lazy"])
def aborting(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[OfflineEngine]:
    config = {"policy": POLICY, "check_moves": 1.0, "poison_released": True, "relocation": request.param}
    with engine(model_dir, config) as one:
        yield one


@pytest.mark.parametrize("when", [1, 40, 41, 42, 43, 60])
def test_an_abort_gives_every_block_back(aborting: OfflineEngine, when: int) -> None:
    """Before the first decision, in the steps around decisions and moves, and long after them."""
    before = aborting.settle()
    names = [aborting.add(prompt, max_tokens=100, ignore_eos=True) for prompt in prompts(6)]
    for step in range(200):
        if step == when:
            aborting.abort(names[::2])
        if not aborting.busy:
            break
        aborting.step()
        assert_every_block_is_somewhere(aborting)
    assert_all_back(aborting)
    after = aborting.snapshots.snapshot()
    assert after.moves_total > before.moves_total, "nothing moved: the test shows nothing"
    assert after.blocks_released_total > before.blocks_released_total


def assert_every_block_is_somewhere(running: OfflineEngine) -> None:
    """I6 from the block lists themselves: free, reserved or held by a request, and never two of these."""
    manager = running.scheduler().kv_cache_manager.coordinator.single_type_managers[0]
    held = {block.block_id for listed in manager.req_to_blocks.values() for block in listed if not block.is_null}
    held |= {block.block_id for extra in manager._extra.values() for block in extra}
    free = manager.block_pool.get_num_free_blocks()
    assert not held & set(manager.reserve)
    assert free + len(manager.reserve) + len(held) == manager.block_pool.num_gpu_blocks - 1


def test_a_full_pool_preempts_and_still_returns_everything(model_dir: Path) -> None:
    """40 blocks for 12 requests that need 5 to 6 each at their budget: preemptions, resumes, no leak."""
    config = {"policy": POLICY, "check_moves": 1.0}
    with engine(model_dir, config, num_gpu_blocks_override=41, max_model_len=512) as one:
        texts = one.run(prompts(12), max_tokens=150, ignore_eos=True)
        assert one.snapshots.snapshot().preemptions_total > 0
        assert all(len(text.token_ids) == 150 for text in texts)


def test_shared_prefixes_are_reclaimed_and_the_cache_is_not_poisoned(model_dir: Path) -> None:
    """One by one, replayed with what was generated, and together: the same texts with the prefix cache off and on."""
    from vllm import SamplingParams

    shared = "The committee met in the old library to discuss how printed texts become electronic ones. " * 6
    given = [f"{shared}Question {i}: what happens next? Answer:" for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    results, hits = {}, {}
    for caching in (False, True):
        config = {"policy": POLICY, "check_moves": 1.0, "headroom_blocks": 16}
        with engine(model_dir, config, enable_prefix_caching=caching, num_gpu_blocks_override=400) as one:
            alone = [one.outputs([(prompt, params, 0)])[0] for prompt in given]
            # The exact text so far as a prompt: blocks behind the first eviction must not be in the cache.
            longer = [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in alone]
            replayed = [one.outputs([(ids, params, 0)])[0] for ids in longer]
            together = one.outputs([(prompt, params, 0) for prompt in given])
            results[caching] = [out.outputs[0].text for out in (*alone, *replayed, *together)]
            hits[caching] = [out.num_cached_tokens for out in (*alone, *replayed, *together)]
            prompt_lengths = [len(out.prompt_token_ids) for out in alone]
            assert one.snapshots.snapshot().blocks_released_total > 0
    assert results[True] == results[False]
    assert set(hits[False]) == {0}
    assert hits[True][0] == 0
    assert min(hits[True][1:]) > 64, "no prefix was shared: the test shows nothing"
    replayed_hits = hits[True][3:6]
    assert all(hit <= length for hit, length in zip(replayed_hits, prompt_lengths, strict=True))


def test_a_request_overrides_the_policy_and_bad_options_fall_back(model_dir: Path) -> None:
    with engine(model_dir, {}) as one:
        options = {"policy": "streaming_llm", "budget_tokens": 48, "protect_recent": 16, "interval_tokens": 8}
        names = [
            one.add(prompts(1)[0], max_tokens=80, ignore_eos=True, extra_args=extra)
            for extra in ({"vtoken": options}, None, {"vtoken": "not json"}, {"vtoken": {"budget": 1}})
        ]
        for _ in range(70):
            one.step()
        live = sorted(len(row["live"]) for row in one.worker("vtoken_rows").values())
        assert live[0] <= 48 + 8
        assert live[1] > 80
        assert one.snapshots.snapshot().invalid_options_total == 2
        one.abort(names)
