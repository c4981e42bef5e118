"""What the block manager says about cached and shared blocks, on vLLM's own pool and requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vtoken.core.config import PolicyOptions
from vtoken.core.wire import Report, RequestReport
from vtoken.engine.block_manager import SHARED_EVERY_GRANTS, VTokenBlockManager, Watched
from vtoken.engine.spec import VTokenSpec

SIZE = 16
OPTIONS = PolicyOptions("streaming_llm", 64)


@pytest.fixture
def manager() -> VTokenBlockManager:
    init_none_hash(sha256)
    pool = BlockPool(65, enable_caching=True, hash_block_size=SIZE)
    spec = VTokenSpec(block_size=SIZE, num_kv_heads=3, head_size=64, dtype=torch.float32)
    return VTokenBlockManager(
        spec, block_pool=pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=SIZE
    )


def request(name: str, tokens: int, prompt_tokens: int | None = None) -> Request:
    """A request of one family: token i has id i. Behind `prompt_tokens` they count as generated."""
    prompt = tokens if prompt_tokens is None else prompt_tokens
    made = Request(
        name, list(range(prompt)), SamplingParams(max_tokens=500), None,
        block_hasher=get_request_block_hasher(SIZE, sha256),
    )  # fmt: skip
    made.append_output_token_ids(list(range(prompt, tokens)))
    return made


def run(manager: VTokenBlockManager, one: Request, evicts: bool, options: PolicyOptions | None = None) -> list[int]:
    """Hit the cache, allocate the rest, hash what may be hashed; the block ids."""
    if evicts:
        manager.watch(one.request_id, Watched(options or OPTIONS, one.num_prompt_tokens))
    (hits,), hit_tokens = manager.find_longest_cache_hit(
        one.block_hashes,
        one.num_tokens - 1,
        [0],
        manager.block_pool,
        manager.kv_cache_spec,
        drop_eagle_block=False,
        alignment_tokens=SIZE,
    )
    manager.add_local_computed_blocks(one.request_id, hits, hit_tokens, 0)
    manager.allocate_new_blocks(one.request_id, one.num_tokens, one.num_tokens)
    manager.cache_blocks(one, one.num_tokens, replay_boundaries=())
    return [block.block_id for block in manager.req_to_blocks[one.request_id]]


def grant(manager: VTokenBlockManager, name: str) -> Any:
    found = manager.grant(name)
    assert found is not None
    return found


def test_only_the_prompt_of_an_evicting_request_enters_the_cache(manager: VTokenBlockManager) -> None:
    run(manager, request("a", 100, prompt_tokens=50), evicts=True)
    hashed = [block.block_hash is not None for block in manager.req_to_blocks["a"]]
    assert hashed == [True] * 3 + [False] * 4
    assert grant(manager, "a").sealed_prefix == 3
    run(manager, request("b", 100, prompt_tokens=50), evicts=False)
    assert all(block.block_hash for block in manager.req_to_blocks["b"][:6])


def test_nothing_is_hashed_once_a_worker_has_moved_tokens(manager: VTokenBlockManager) -> None:
    one = request("a", 40, prompt_tokens=40)
    ids = run(manager, one, evicts=True)
    manager.apply(Report(1, (RequestReport("a", grant(manager, "a").incarnation, (ids[0],), (), 24, 40),)))
    one.append_output_token_ids(list(range(40, 64)))
    manager.allocate_new_blocks("a", 64, 64)
    manager.cache_blocks(one, 64, replay_boundaries=())
    assert [block.block_hash for block in manager.req_to_blocks["a"][2:]] == [None, None]


def test_between_chunks_hashing_ends_where_an_eviction_may_have_been(manager: VTokenBlockManager) -> None:
    """Chunks of 48 under a budget of 64: after two of them the request forgets; the third depends on that."""
    between = PolicyOptions("streaming_llm", 64, between_chunks=True)
    one = request("a", 192)
    manager.watch("a", Watched(between, 192))
    for computed in (0, 48, 96, 144):
        one.num_computed_tokens = computed
        manager.allocate_new_blocks("a", computed + 48, computed + 48)
        manager.cache_blocks(one, computed + 48, replay_boundaries=())
    hashed = [block.block_hash is not None for block in manager.req_to_blocks["a"]]
    assert hashed == [True] * 6 + [False] * 6


def test_hits_behind_the_prompt_are_sealed_too(manager: VTokenBlockManager) -> None:
    """A resumed request may hit blocks that another request generated: its worker must not write them."""
    run(manager, request("generator", 100), evicts=False)
    run(manager, request("resumed", 100, prompt_tokens=20), evicts=True)
    found = grant(manager, "resumed")
    assert found.sealed_prefix == 6
    assert len(found.shared) == 6


def test_sharing_is_seen_behind_a_block_that_the_other_has_released(manager: VTokenBlockManager) -> None:
    first = run(manager, request("a", 100), evicts=True)
    run(manager, request("b", 100), evicts=True)
    report = RequestReport("a", grant(manager, "a").incarnation, tuple(first[1:3]), (), 68, 100)
    manager.apply(Report(1, (report,)))
    assert grant(manager, "b").shared == tuple((block, 2) for block in (first[0], *first[3:6]))


def test_what_has_not_changed_is_not_said_again(manager: VTokenBlockManager) -> None:
    run(manager, request("a", 100), evicts=True)
    run(manager, request("b", 100), evicts=True)
    said = [grant(manager, "b") for _ in range(SHARED_EVERY_GRANTS + 1)]
    assert said[0].sealed_prefix == 6
    assert said[0].shared
    assert all(later.sealed_prefix is None and later.shared is None for later in said[1:])
    manager.free("a")
    later = [grant(manager, "b").shared for _ in range(SHARED_EVERY_GRANTS)]
    assert [shared for shared in later if shared is not None] == [()]
