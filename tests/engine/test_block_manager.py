"""VTokenBlockManager on vLLM's real pool: growth, reports on time, late, twice and after the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.errors import ConfigError, ProtocolError
from vtoken.core.wire import Report, RequestReport
from vtoken.engine.block_manager import VTokenBlockManager, Watched
from vtoken.engine.scheduler_side import SchedulerSide
from vtoken.engine.spec import VTokenSpec

SIZE, BLOCKS = 16, 33
EVICTING = PolicyOptions("streaming_llm", 64)


@pytest.fixture
def manager() -> Iterator[VTokenBlockManager]:
    """A manager without prefix cache; at the end every block must be back."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(BLOCKS, enable_caching=False, hash_block_size=SIZE)
    spec = VTokenSpec(block_size=SIZE, num_kv_heads=3, head_size=64, dtype=torch.float32)
    manager = VTokenBlockManager(
        spec, block_pool=pool, enable_caching=False, kv_cache_group_id=0, scheduler_block_size=SIZE
    )
    yield manager
    for name in list(manager.req_to_blocks):
        manager.free(name)
    assert pool.get_num_free_blocks() + len(manager.reserve) == BLOCKS - 1
    assert not manager._extra
    assert not manager._growth
    assert not manager._held


def start(manager: VTokenBlockManager, name: str, tokens: int) -> list[int]:
    """A request that evicts, `tokens` long; its block ids."""
    manager.watch(name, Watched(EVICTING, tokens))
    blocks = manager.allocate_new_blocks(name, tokens, tokens)
    manager.num_cached_block[name] = 0
    return [block.block_id for block in blocks]


def entry(manager: VTokenBlockManager, name: str, released: list[int], tail: int, total: int, *consumed: int) -> Report:
    incarnation = manager.ledger.incarnation(name)
    return Report(1, (RequestReport(name, incarnation, tuple(released), tuple(consumed), tail, total),))


def test_a_detached_request_grows_by_its_physical_tail_through_the_grant(manager: VTokenBlockManager) -> None:
    ids = start(manager, "a", 100)
    assert len(ids) == 7
    manager.apply(entry(manager, "a", ids[2:], 30, 100))
    assert manager.released_total == 5
    assert manager.held_blocks("a") == manager.referenced_blocks() == 2
    for total in (101, 102):
        assert manager.get_num_blocks_to_allocate("a", total, (), 0, 0, total) == 0
        assert manager.allocate_new_blocks("a", total, total) == []
    assert manager.get_num_blocks_to_allocate("a", 103, (), 0, 0, 103) == 1
    assert manager.allocate_new_blocks("a", 103, 103) == []
    grant = manager.grant("a")
    assert grant is not None
    assert len(grant.growth) == 1
    assert manager.grant("a").growth == ()  # type: ignore[union-attr]
    assert manager.held_blocks("a") == manager._held["a"] == manager.referenced_blocks() == 3


def test_the_logical_list_keeps_one_entry_per_block_of_logical_length(manager: VTokenBlockManager) -> None:
    ids = start(manager, "a", 64)
    manager.apply(entry(manager, "a", ids[1:3], 32, 64))
    manager.allocate_new_blocks("a", 200, 200)
    listed = manager.req_to_blocks["a"]
    assert len(listed) == -(-200 // SIZE)
    assert [block.is_null for block in listed[:4]] == [False, True, True, False]


@pytest.mark.parametrize("repeat", [1, 2, 3])
def test_a_report_applied_again_returns_its_blocks_once(manager: VTokenBlockManager, repeat: int) -> None:
    ids = start(manager, "a", 64)
    manager.watch("another", Watched(EVICTING, 16))  # a reserve is held while any request evicts
    manager.reserve_target = 2
    manager.refill()
    target = next(iter(manager.reserve))
    report = entry(manager, "a", ids[:2], 48, 64, target)
    for _ in range(repeat):
        manager.apply(report)
    assert manager.released_total == 2
    assert manager.held_blocks("a") == 3
    assert len(manager.reserve) == 2


def test_a_report_after_the_end_only_returns_what_it_consumed(manager: VTokenBlockManager) -> None:
    ids = start(manager, "a", 64)
    manager.watch("another", Watched(EVICTING, 16))  # a reserve is held while any request evicts
    manager.reserve_target = 2
    manager.refill()
    target = next(iter(manager.reserve))
    report = entry(manager, "a", ids[:2], 48, 64, target)
    manager.free("a")
    manager.unwatch("a")
    for _ in range(2):
        manager.apply(report)
        assert manager.block_pool.get_num_free_blocks() + len(manager.reserve) == BLOCKS - 1
    assert manager.released_total == 0


def test_an_idle_engine_holds_no_reserve_so_that_the_prefix_cache_can_be_reset(manager: VTokenBlockManager) -> None:
    manager.reserve_target = 4
    manager.new_step_starts()
    assert not manager.reserve
    start(manager, "a", 64)
    manager.new_step_starts()
    assert len(manager.reserve) == 4
    manager.free("a")
    manager.unwatch("a")
    assert manager.block_pool.get_num_free_blocks() == BLOCKS - 1
    assert manager.block_pool.reset_prefix_cache()


def test_a_new_request_waits_for_the_reserve_but_not_for_ever_and_not_for_nothing(manager: VTokenBlockManager) -> None:
    now = 100.0
    side = SchedulerSide(VTokenConfig(headroom_blocks=4, hold_seconds=3.0), clock=lambda: now)
    coordinator = SimpleNamespace(single_type_managers=[manager])
    side.bind(SimpleNamespace(coordinator=coordinator, block_pool=manager.block_pool, max_model_len=256))  # type: ignore[arg-type]
    waiting = SimpleNamespace(request_id="w")
    manager.allocate_new_blocks("plain", 30 * SIZE, 30 * SIZE)
    manager.new_step_starts()
    assert not side.must_wait(waiting), "nobody evicts: no reserve is wanted"
    manager.watch("w", Watched(EVICTING, 16))
    manager.new_step_starts()
    assert len(manager.reserve) == 2
    assert side.must_wait(waiting)
    assert side.block_counts()["held_requests"] == 1
    now = 102.9
    assert side.must_wait(waiting)
    now = 103.1
    assert not side.must_wait(waiting), "held longer than hold_seconds"
    assert side.must_wait(SimpleNamespace(request_id="another"))
    manager.free("plain")
    manager.new_step_starts()
    assert len(manager.reserve) == 4
    assert side.block_counts()["held_requests"] == 0, "nothing is waited for, although nobody has asked about it again"
    assert not side.must_wait(waiting)
    manager.unwatch("w")
    assert side.holds_expired == 1


def test_a_prompt_evicted_between_chunks_is_charged_no_more_than_it_ever_holds(manager: VTokenBlockManager) -> None:
    """300 tokens in chunks of 48 under a budget of 64 lie in 112 at most: 7 blocks, of which it may hold some."""
    between = replace(EVICTING, between_chunks=True)
    manager.watch("a", Watched(between, 300, 48))
    asked = [
        manager.get_num_blocks_to_allocate("a", 300, (), 0, 0, 300, apply_admission_cap=cap) for cap in (True, False)
    ]
    assert asked == [7, 19]


def test_a_report_of_an_earlier_life_does_not_touch_the_new_one(manager: VTokenBlockManager) -> None:
    ids = start(manager, "a", 64)
    report = entry(manager, "a", ids[:2], 32, 64)
    manager.free("a")  # preempted
    start(manager, "a", 64)
    assert manager.grant("a") is not None  # a new incarnation begins
    manager.apply(report)
    assert manager.held_blocks("a") == 4
    assert not manager.ledger.detached("a")


def test_an_older_report_does_not_undo_a_newer_one(manager: VTokenBlockManager) -> None:
    ids = start(manager, "a", 96)
    old, new = entry(manager, "a", ids[5:], 80, 96), entry(manager, "a", ids[3:5], 48, 97)
    manager.apply(new)
    manager.apply(old)
    assert manager.ledger.blocks_needed("a", 97) == 3
    assert manager.held_blocks("a") == 3
    start(manager, "b", 40)
    assert manager.referenced_blocks() == manager.held_blocks("a") + manager.held_blocks("b") == 6


def test_a_shared_block_is_freed_by_its_last_holder(manager: VTokenBlockManager) -> None:
    ids = start(manager, "a", 32)
    shared = manager.req_to_blocks["a"][0]
    manager.block_pool.touch([shared])  # a second request refers to it
    manager.apply(entry(manager, "a", ids[:1], 16, 32))
    assert shared.ref_cnt == 1
    manager.block_pool.free_blocks([shared])


def test_a_reserve_that_eats_the_pool_is_refused_with_the_numbers(manager: VTokenBlockManager) -> None:
    coordinator = SimpleNamespace(single_type_managers=[manager])
    cache = SimpleNamespace(coordinator=coordinator, block_pool=manager.block_pool, max_model_len=256)
    with pytest.raises(ConfigError, match="headroom_blocks = 17 is not valid: allowed is 0 to 16: the pool has 32"):
        SchedulerSide(VTokenConfig(headroom_blocks=17)).bind(cache)  # type: ignore[arg-type]
    assert not manager.reserve


def test_a_worker_of_another_version_is_refused(manager: VTokenBlockManager) -> None:
    with pytest.raises(ProtocolError, match="version 99"):
        SchedulerSide(VTokenConfig()).apply(Report(1, (), version=99))


def bound(
    manager: VTokenBlockManager, chunk_tokens: int | None = None, max_model_len: int = 256, **settings: Any
) -> SchedulerSide:
    """The scheduler's end over this manager."""
    side = SchedulerSide(VTokenConfig(**settings), chunk_tokens)
    coordinator = SimpleNamespace(single_type_managers=[manager])
    side.bind(SimpleNamespace(coordinator=coordinator, block_pool=manager.block_pool, max_model_len=max_model_len))  # type: ignore[arg-type]
    return side


def arriving(name: str, prompt: int, *, most: int = 16, resumable: bool = False, **options: Any) -> Any:
    """A request as vLLM's scheduler holds it, that may generate `most` tokens."""
    params = SamplingParams(extra_args={"vtoken": {"policy": "streaming_llm", "budget_tokens": 64, **options}})
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt, max_tokens=most, sampling_params=params, resumable=resumable,
        skip_reading_prefix_cache=False,
    )  # fmt: skip


def test_a_resumed_request_is_charged_for_what_it_had_generated_as_well(manager: VTokenBlockManager) -> None:
    """A prompt of 50 and 250 tokens behind it are computed anew before anything is evicted."""
    bound(manager, chunk_tokens=48).on_new_request(arriving("a", 50))
    assert manager.get_num_blocks_to_allocate("a", 300, (), 0, 0, 300, apply_admission_cap=True) == 19


@pytest.mark.parametrize(
    ("request_", "watched"),
    [
        (arriving("a", 50, min_prompt_tokens=50), True),
        (arriving("a", 50, min_prompt_tokens=51), False),
        (arriving("a", 50, resumable=True), False),
    ],
)
def test_what_can_never_evict_is_left_to_vllm(manager: VTokenBlockManager, request_: Any, watched: bool) -> None:
    """Prompts that are left alone; and sessions of streamed inputs, whose rows begin anew with the blocks they have."""
    bound(manager).on_new_request(request_)
    assert (manager.grant("a") is not None) is watched


def test_a_report_that_comes_again_late_does_not_take_what_has_another_use_by_now(manager: VTokenBlockManager) -> None:
    side = bound(manager, headroom_blocks=2)
    ids = start(manager, "a", 64)
    manager.refill()
    taken, other = manager.reserve
    first = entry(manager, "a", ids[:2], 48, 64, taken)
    second = replace(entry(manager, "a", [taken], 48, 65, other), sequence=2)
    for report in (first, second, first):
        side.apply(report)
        assert manager.held_blocks("a") == 3
    assert taken in manager.reserve, "released, and kept for evacuation again"


def test_no_report_is_acknowledged_before_all_older_ones(manager: VTokenBlockManager) -> None:
    """The reserve that a Grant names must reflect every report that it acknowledges."""
    side, acknowledged = bound(manager), []
    for sequence in (2, 1, 4, 3, 3):
        side.apply(Report(sequence, ()))
        acknowledged.append(side.grant(SimpleNamespace(num_scheduled_tokens={})).report_ack)  # type: ignore[arg-type]
    assert acknowledged == [0, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("prompt", "most", "sealed"),
    [
        (400, 40, True),  # 28 blocks in all: fits whole
        (400, 2000, False),  # 25 blocks of the prompt, and 7 that it packs into, are more than 30
        (360, 2000, True),  # 23 and 7
        (800, 16, False),  # larger than the pool
    ],
)
def test_what_may_outgrow_the_pool_is_sealed_only_where_there_is_room_beside_its_peak(
    manager: VTokenBlockManager, prompt: int, most: int, sealed: bool
) -> None:
    """Sealed blocks with a few holes stay where they are, and then the request would be preempted again and again."""
    between = replace(EVICTING, between_chunks=True)
    side = bound(manager, chunk_tokens=48, max_model_len=4096, policy=between, headroom_blocks=2)
    request = arriving("a", prompt, most=most)
    side.on_new_request(request)
    assert request.skip_reading_prefix_cache is not sealed
    assert manager._evicting["a"].cached is sealed
