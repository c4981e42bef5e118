"""The block manager: which blocks a request holds, and the reserve.

vLLM's FullAttentionManager keeps one block per S logical positions. Ours does the same until a
worker reports that it relocated or released something; from then on ("detached") a request holds

    req_to_blocks[r]   one entry per S logical positions; vacated ones are the null block, as under
                       vLLM's sliding window, so vLLM's own index arithmetic stays right
    _extra[r]          blocks without a logical index: evacuation blocks, and growth of the tail

and needs blocks by the length of its physical tail (PhysicalLedger). Growth of a detached request
reaches the worker in the Grant, not through vLLM's list, whose row has room for logical blocks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vtoken.core.config import PolicyOptions
from vtoken.core.eviction import cacheable_tokens
from vtoken.core.ledger import PhysicalLedger
from vtoken.core.wire import Report, RequestGrant, RequestReport

SHARED_EVERY_GRANTS = 16
"""Which of a request's blocks are shared is looked up again after so many of its steps."""


@dataclass(slots=True)
class _Told:
    """What the worker knows about one request's blocks, and when to look again."""

    sealed_prefix: int = 0
    shared: tuple[tuple[int, int], ...] = ()
    grants: int = 0


@dataclass(frozen=True, slots=True)
class Watched:
    """A request whose policy evicts.

    Attributes:
        prompt_tokens: length of its prompt.
        chunk_tokens: the largest chunk of it in one step, where its survivors are packed before the next one; None: it
            lies in memory whole.
        cached: whether its prompt may enter the prefix cache.
    """

    options: PolicyOptions
    prompt_tokens: int
    chunk_tokens: int | None = None
    cached: bool = True


class VTokenBlockManager(FullAttentionManager):
    """Owner of request block lists, the reserve and the physical ledger (engine core process)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger = PhysicalLedger(self.block_size)
        self.reserve: dict[int, KVCacheBlock] = {}
        self.reserve_target = 0
        self.released_total = 0
        self._evicting: dict[str, Watched] = {}
        self._extra: dict[str, list[KVCacheBlock]] = {}
        self._growth: dict[str, list[int]] = {}  # granted, not sent to the worker yet
        self._held: dict[str, int] = {}  # real blocks held, by detached request
        self._told: dict[str, _Told] = {}

    # ---- requests --------------------------------------------------------------------------------

    def watch(self, request_id: str, watched: Watched) -> None:
        """This request's policy evicts: only K/V that depends on no eviction may enter the prefix cache."""
        self._evicting[request_id] = watched

    def unwatch(self, request_id: str) -> None:
        """The request is over. Unknown ids are fine. After the last one the reserve is free blocks again."""
        self._evicting.pop(request_id, None)
        if not self._evicting:
            self._release_reserve()

    @property
    def watches(self) -> bool:
        """Whether any request's policy evicts; if not, blocks are managed as in vLLM."""
        return bool(self._evicting)

    def held_blocks(self, request_id: str) -> int:
        """Real blocks that the request holds, counted from scratch."""
        listed = sum(not block.is_null for block in self.req_to_blocks.get(request_id, ()))
        return listed + len(self._extra.get(request_id, ()))

    def referenced_blocks(self) -> int:
        """Real blocks of all requests; a shared one counts for each."""
        held = self._held
        return sum(held.get(name, len(listed)) for name, listed in self.req_to_blocks.items())

    def grant(self, request_id: str) -> RequestGrant | None:
        """What the worker must know about a scheduled request; hands over its growth. None: nothing."""
        if request_id not in self._evicting:
            return None
        growth = tuple(self._growth.pop(request_id, ()))
        incarnation = self.ledger.incarnation(request_id)
        if not self.enable_caching:
            return RequestGrant(incarnation, growth)
        told = self._told.setdefault(request_id, _Told(grants=-1))
        told.grants += 1
        sealed = self.num_cached_block.get(request_id, 0)  # hits may reach behind the prompt after a resume
        news = sealed if sealed != told.sealed_prefix else None
        told.sealed_prefix = sealed
        return RequestGrant(incarnation, growth, news, self._news_of_sharing(request_id, told))

    def _news_of_sharing(self, request_id: str, told: _Told) -> tuple[tuple[int, int], ...] | None:
        """The sealed blocks that other requests refer to, with how many, if looked up now and changed."""
        if told.grants % SHARED_EVERY_GRANTS:
            return None
        listed = self.req_to_blocks.get(request_id, [])[: told.sealed_prefix]
        shared = tuple((block.block_id, block.ref_cnt) for block in listed if block.ref_cnt > 1 and not block.is_null)
        news = shared if shared != told.shared else None
        told.shared = shared
        return news

    # ---- the reserve -----------------------------------------------------------------------------

    def new_step_starts(self) -> None:
        """Refill the reserve before anything is scheduled: it has priority over new requests."""
        super().new_step_starts()
        self.refill()

    def refill(self) -> None:
        """Take free blocks into the reserve up to its target, while there are requests that evict."""
        missing = min(self.reserve_target - len(self.reserve), self.block_pool.get_num_free_blocks())
        if missing > 0 and self._evicting:
            self.reserve.update((block.block_id, block) for block in self.block_pool.get_new_blocks(missing))

    def reserve_may_recover(self) -> bool:
        """Whether the reserve is short, somebody may need it, and requests that run may free blocks for it."""
        return len(self.reserve) < self.reserve_target and bool(self._evicting) and bool(self.req_to_blocks)

    def _release_reserve(self) -> None:
        """Nobody needs it: an idle engine holds no block, so that its prefix cache can be reset."""
        reserve, self.reserve = self.reserve, {}
        self._free(list(reserve.values()))

    # ---- reports ---------------------------------------------------------------------------------

    def apply(self, report: Report) -> None:
        """Apply what a worker did. Idempotent; late reports return their blocks and change no more."""
        for entry in report.requests:
            if self.ledger.accepts(entry) and entry.request_id in self.req_to_blocks:
                self._apply_live(entry)
            else:
                self._free([self.reserve.pop(b) for b in entry.consumed if b in self.reserve])
        self.refill()

    def _apply_live(self, entry: RequestReport) -> None:
        if not self.ledger.detached(entry.request_id):
            self._held[entry.request_id] = self.held_blocks(entry.request_id)
        self.ledger.record(entry)
        consumed = [self.reserve.pop(b) for b in entry.consumed if b in self.reserve]
        extra = self._extra.setdefault(entry.request_id, [])
        extra += consumed
        gone = set(entry.released)
        listed = self.req_to_blocks[entry.request_id]
        freed: list[KVCacheBlock] = []
        for index, block in enumerate(listed):
            if block.block_id in gone and not block.is_null:
                freed.append(block)
                listed[index] = self._null_block
        freed += [block for block in extra if block.block_id in gone]
        extra[:] = [block for block in extra if block.block_id not in gone]
        self._held[entry.request_id] += len(consumed) - len(freed)
        self.released_total += len(freed)
        self._free(freed)

    def _free(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.block_pool.free_blocks(reversed(blocks))

    # ---- vLLM's manager interface ----------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *args: Any,
        apply_admission_cap: bool = False, **kwargs: Any,
    ) -> int:  # fmt: skip
        """As in vLLM; a detached request needs blocks for its physical tail only.

        At admission (`apply_admission_cap`) vLLM asks for all tokens, those from before a preemption too: one that
        evicts between chunks is charged no more than it ever holds at once.
        """
        watched = self._evicting.get(request_id)
        if watched is not None and self.ledger.detached(request_id):
            return max(self.ledger.blocks_needed(request_id, num_tokens) - self._held[request_id], 0)
        if apply_admission_cap and watched is not None:
            num_tokens = watched.options.peak_tokens(num_tokens, watched.chunk_tokens)
        needed: int = super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, *args, **kwargs)
        return needed

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """As in vLLM; a detached request's new blocks go into the Grant and its list gets null blocks."""
        if not self.ledger.detached(request_id):
            blocks: list[KVCacheBlock] = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
            return blocks
        missing = self.ledger.blocks_needed(request_id, num_tokens) - self._held[request_id]
        if missing > 0:
            self._held[request_id] += missing
            new = self.block_pool.get_new_blocks(missing)
            self._extra.setdefault(request_id, []).extend(new)
            self._growth.setdefault(request_id, []).extend(block.block_id for block in new)
        listed = self.req_to_blocks[request_id]
        listed.extend([self._null_block] * (-(-num_tokens // self.block_size) - len(listed)))
        return []

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """As in vLLM; what follows a request's first eviction depends on it: never cached."""
        watched = self._evicting.get(request.request_id)
        if watched is not None:
            unchanged = cacheable_tokens(watched.options, watched.prompt_tokens, request.num_computed_tokens)
            num_tokens = min(num_tokens, unchanged)
            if self.ledger.detached(request.request_id) or not watched.cached or not num_tokens:
                return
        super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As in vLLM, with the blocks that have no logical index. Ends the request's incarnation."""
        self.ledger.forget(request_id)
        self._told.pop(request_id, None)
        self._growth.pop(request_id, None)
        self._held.pop(request_id, None)
        extra = self._extra.pop(request_id, [])
        listed: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        if not self.req_to_blocks:
            self._release_reserve()
        return listed + extra
