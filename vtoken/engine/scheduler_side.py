"""The scheduler's half of the connector: grants, reports, admission hold, block counts.

Lives in the engine core process; one owner of the protocol towards the workers. The blocks
themselves are owned by the VTokenBlockManager that it binds to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vtoken.core.capacity import blocks_for, headroom_target, longest_blocks, packs
from vtoken.core.config import PolicyOptions, Relocation, Variant, VTokenConfig
from vtoken.core.errors import ConfigError, UnsupportedError
from vtoken.core.wire import Grant, Report, require_version
from vtoken.engine.block_manager import VTokenBlockManager, Watched
from vtoken.engine.requests import options_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.vtoken")

SHARED_SCAN_SECONDS = 1.0
"""Shared blocks are counted by a scan over the pool, at most this often."""


class SchedulerSide:
    """Owner of the scheduler's end of the protocol; thin methods called by the connector.

    Attributes:
        invalid_options: requests whose own options were unusable inside the engine.
        holds_expired: requests that were let go although the reserve was still short.
    """

    def __init__(
        self, config: VTokenConfig, chunk_tokens: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`chunk_tokens`: the largest chunk of a prompt that is computed in one step; None: whole prompts."""
        self.config = config
        self.chunk_tokens = chunk_tokens
        self.invalid_options = 0
        self.holds_expired = 0
        self._clock = clock
        self._report_ack = 0  # this report, and all before it, were applied
        self._applied_early: set[int] = set()  # and these, which came before an older one
        self._held_since: dict[str, float] = {}
        self._shared = (float("-inf"), 0)  # (when counted, blocks)
        self._manager: VTokenBlockManager | None = None
        self._max_model_len = 0

    @property
    def manager(self) -> VTokenBlockManager:
        """The bound block manager."""
        assert self._manager is not None, "bind() comes first"
        return self._manager

    def bind(self, cache: KVCacheManager) -> None:
        """Take the engine's block manager and set how large its reserve may be.

        Raises:
            UnsupportedError: the engine built another manager: vToken did not engage.
            ConfigError: the reserve would leave no room for a request.
        """
        managers = cache.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], VTokenBlockManager):
            found = ", ".join(type(manager).__name__ for manager in managers)
            raise UnsupportedError(
                f"vToken did not engage: the engine uses the block managers [{found}], not one VTokenBlockManager. "
                "Start it with the arguments of vtoken.engine.args (worker_cls and kv_transfer_config together)."
            )
        self._manager, self._max_model_len = managers[0], cache.max_model_len
        capacity = cache.block_pool.num_gpu_blocks - 1
        longest = longest_blocks(self.config, self._manager.block_size, cache.max_model_len, self.chunk_tokens)
        spare = capacity - longest
        target = headroom_target(self.config, self._manager.enable_caching, spare)
        lazy = self.config.variant is Variant.VTOKEN and self.config.relocation is Relocation.LAZY
        if target > max(spare, 0) or (lazy and not target):
            raise ConfigError(
                "vtoken.headroom_blocks", target,
                f"{int(lazy)} to {max(spare, 0)}: the pool has {capacity} blocks, and one request of "
                f"max_model_len = {cache.max_model_len} tokens takes up to {longest}",
                "Lower it or max_model_len, or raise num_gpu_blocks_override or kv_cache_memory_bytes.",
            )  # fmt: skip
        self._manager.reserve_target = target

    # ---- requests --------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Learn whether a request evicts; count options that make no sense."""
        options, problem = options_of(request.sampling_params, self.config)
        if problem is not None:
            self.invalid_options += 1
            logger.warning("request %s uses the engine's default vToken options: %s", request.request_id, problem)
        manager, prompt = self.manager, request.num_prompt_tokens
        if not options.evicts_from(prompt) or self.config.variant is Variant.NATIVE or request.resumable:
            return  # a session of streamed inputs begins anew with the blocks it has: nothing may have left them
        cached = self._may_be_sealed(options, prompt, request.max_tokens)
        if not cached:
            request.skip_reading_prefix_cache = True  # hits are sealed, too
        chunk_tokens = self.chunk_tokens if packs(self.config) else None
        manager.watch(request.request_id, Watched(options, prompt, chunk_tokens, cached))

    def _may_be_sealed(self, options: PolicyOptions, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether the pool has room for a request whose prompt is sealed: whole, or for what it packs elsewhere beside
        the prompt's blocks, which are never written and may stay. If not, it might be preempted for ever.
        """
        manager, most = self.manager, min(prompt_tokens + max_tokens, self._max_model_len)
        size = manager.block_size
        room: int = manager.block_pool.num_gpu_blocks - 1 - manager.reserve_target
        packed = longest_blocks(self.config, size, most, self.chunk_tokens, options)
        return min(blocks_for(most, size), packed + blocks_for(prompt_tokens, size)) <= room

    def on_finished(self, request_id: str) -> None:
        """The request is over, however it ended."""
        self.manager.unwatch(request_id)
        self._held_since.pop(request_id, None)

    def must_wait(self, request: Request) -> bool:
        """Admission hold: wait while the reserve is short and running requests may refill it.

        Never longer than `hold_seconds`, and never when nothing runs: then nothing would end the wait.
        vLLM does not hold requests for prompt log-probabilities: it admits them whatever this says.
        """
        if not self.manager.reserve_may_recover():
            self._held_since.pop(request.request_id, None)
            return False
        since = self._held_since.setdefault(request.request_id, self._clock())
        if self._clock() - since < self.config.hold_seconds:
            return True
        if since != float("-inf"):
            self.holds_expired += 1
            self._held_since[request.request_id] = float("-inf")  # let go: not held again, and counted once
        return False

    # ---- a step ----------------------------------------------------------------------------------

    def grant(self, step: SchedulerOutput) -> Grant:
        """What the workers may use in this step. Hands over the growth of detached requests."""
        manager = self.manager
        grants = {name: manager.grant(name) for name in step.num_scheduled_tokens} if manager.watches else {}
        requests = {name: grant for name, grant in grants.items() if grant is not None}
        return Grant(tuple(manager.reserve), self._report_ack, requests, self._urgency())

    def _urgency(self) -> float:
        """0 while the pool has its low water of free blocks, 1 when it has none."""
        pool = self.manager.block_pool
        low = self.config.low_water * (pool.num_gpu_blocks - 1)
        return max(0.0, 1.0 - pool.get_num_free_blocks() / low) if low else 0.0

    def apply(self, report: Report) -> None:
        """Apply a worker's report, once: its blocks may have another use when it comes again.

        Raises:
            ProtocolError: the worker speaks another version.
        """
        require_version(report.version, "the worker")
        if report.sequence <= self._report_ack or report.sequence in self._applied_early:
            return
        self.manager.apply(report)
        self._applied_early.add(report.sequence)
        while self._report_ack + 1 in self._applied_early:
            self._report_ack += 1
            self._applied_early.remove(self._report_ack)

    # ---- telemetry -------------------------------------------------------------------------------

    def block_counts(self) -> dict[str, Any]:
        """Snapshot fields that only the scheduler knows; the four block states sum to the capacity (I6)."""
        manager = self.manager
        pool = manager.block_pool
        capacity, free, reserved = pool.num_gpu_blocks - 1, pool.get_num_free_blocks(), len(manager.reserve)
        shared = min(self._shared_blocks(), capacity - free - reserved)
        return {
            "capacity_blocks": capacity,
            "free_blocks": free,
            "reserved_blocks": reserved,
            "headroom_target_blocks": manager.reserve_target,
            "shared_blocks": shared,
            "private_blocks": capacity - free - reserved - shared,
            "referenced_blocks": manager.referenced_blocks(),
            "held_requests": self._held(),
            "invalid_options_total": self.invalid_options,
            "holds_expired_total": self.holds_expired,
        }

    def _held(self) -> int:
        """Requests that are held now; one that was, and has not been asked about since, is none."""
        if not self.manager.reserve_may_recover():
            return 0
        return sum(since != float("-inf") for since in self._held_since.values())

    def _shared_blocks(self) -> int:
        if not self.manager.enable_caching or not self.manager.req_to_blocks:
            return 0
        counted_at, shared = self._shared
        if self._clock() - counted_at >= SHARED_SCAN_SECONDS:
            shared = sum(block.ref_cnt > 1 for block in self.manager.block_pool.blocks if not block.is_null)
            self._shared = (self._clock(), shared)
        return shared
