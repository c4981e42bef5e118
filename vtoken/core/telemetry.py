"""What a replica says about its memory: one frozen, flat, JSON-ready snapshot.

Produced in the engine (worker tables + block manager), carried by vLLM's stat logger into the replica
process, pushed to the controller. The words here are the words of the dashboards and of `/v1/vtoken/fleet`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

COPY_BOUNDS_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1)
"""Of the histogram of copy times."""


class Phase(StrEnum):
    """A part of the substrate's work on an engine's step path, in its order."""

    ACCEPT = "accept"  # events and grants taken over, copies of requests that are gone stopped
    LAND = "land"  # plans behind copies that are done committed, or waited for
    DECIDE = "decide"  # policies asked, plans made, copied at once and committed
    GROW = "grow"  # slots for the step's new tokens
    AFTER = "after"  # decisions between chunks, evacuations planned and submitted


Details = dict[str, dict[str, float]]
"""What one engine counts by label, for metrics only: name in the catalogue -> value of its own label ("" if it has
none) -> number. A Snapshot stays small and flat, because every one of them goes to the controller; these do not leave
their replica.
"""


def detail(counts: Mapping[str, float]) -> dict[str, float]:
    """Counts by member of an enumeration, with plain texts as keys: what a message can carry."""
    return {str(key): count for key, count in counts.items()}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of one engine at one step. Gauges unless the name ends in `_total`.

    Invariant (I6): free_blocks + reserved_blocks + private_blocks + shared_blocks = capacity_blocks.

    Attributes:
        block_size_tokens: S.
        capacity_blocks: usable blocks (vLLM's null block is not counted).
        free_blocks: blocks that the allocator can hand out now (cached-but-unreferenced included).
        reserved_blocks: blocks held for evacuation (headroom).
        headroom_target_blocks: how many should be reserved.
        private_blocks: blocks of exactly one request.
        shared_blocks: blocks that two or more requests refer to.
        referenced_blocks: blocks that requests have; a shared block counts once per request. As of the same moment as
            the counts above: `allocated_blocks` is the worker's, from the last step's beginning, and may still hold
            those of requests that have ended since.
        tracked_requests: requests with a token table.
        allocated_blocks: blocks in token tables (a shared block counts once per request).
        live_tokens: tokens that attention still sees.
        dead_slots: allocated_blocks * S - live_tokens.
        reclaimable_blocks: sum over requests of allocated - ceil(live / S).
        inflight_plans: evacuation plans whose copy is not committed.
        degraded: 1 once a failed check has ended relocation on the worker, else 0.
        running_requests, waiting_requests: vLLM's scheduler queues, held requests included.
        preemptions_total, steps_total: of this engine since its start.
        tokens_registered_total, tokens_evicted_total: since start.
        moves_total: tokens relocated. moved_bytes_total: their K/V bytes, all layers.
        copies_total, copy_seconds_total: copy calls and the time in them.
        copy_waits_total: evacuations whose copy the engine waited for because memory was urgent.
        score_bytes: memory of the queries that are kept for policies which need attention.
        held_requests: waiting requests held back until the reserve is refilled.
        holds_expired_total: requests let go after `hold_seconds` although the reserve was still short.
        blocks_released_total: blocks given back to the allocator while their request lived.
        blocks_consumed_total: reserve blocks that became evacuation blocks.
        plans_deferred_total: decisions that wanted memory which the reserve did not have.
        move_checks_total, move_check_failures_total: invariant I1 (config `check_moves`).
        policy_failures_total: decisions at which a policy raised or chose what it may not; its request
            then keeps all its tokens (under `between_chunks` it forgets the oldest).
        invalid_options_total: requests whose options did not parse inside the engine.
        substrate_seconds_total: time spent in the substrate on the worker's step path.
    """

    block_size_tokens: int = 0
    capacity_blocks: int = 0
    free_blocks: int = 0
    reserved_blocks: int = 0
    headroom_target_blocks: int = 0
    private_blocks: int = 0
    shared_blocks: int = 0
    referenced_blocks: int = 0
    tracked_requests: int = 0
    allocated_blocks: int = 0
    live_tokens: int = 0
    dead_slots: int = 0
    reclaimable_blocks: int = 0
    inflight_plans: int = 0
    degraded: int = 0
    score_bytes: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    held_requests: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    tokens_registered_total: int = 0
    tokens_evicted_total: int = 0
    moves_total: int = 0
    moved_bytes_total: int = 0
    copies_total: int = 0
    copy_seconds_total: float = 0.0
    copy_waits_total: int = 0
    blocks_released_total: int = 0
    blocks_consumed_total: int = 0
    plans_deferred_total: int = 0
    move_checks_total: int = 0
    move_check_failures_total: int = 0
    policy_failures_total: int = 0
    invalid_options_total: int = 0
    holds_expired_total: int = 0
    substrate_seconds_total: float = 0.0

    @property
    def waste_ratio(self) -> float:
        """F = 1 - live / (allocated * S), eq. 1 of the paper; 0 when nothing is allocated."""
        slots = self.allocated_blocks * self.block_size_tokens
        return 1.0 - self.live_tokens / slots if slots else 0.0

    def to_mapping(self) -> dict[str, Any]:
        """JSON-ready, `waste_ratio` included."""
        return {**asdict(self), "waste_ratio": self.waste_ratio}

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Snapshot:
        """Read what `to_mapping` wrote; unknown keys are ignored (a newer peer may say more)."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in raw.items() if key in known})


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A snapshot on its way from a replica to the controller.

    Attributes:
        replica_id: Serve's unique id of the replica.
        sequence: strictly increasing per replica life; the controller drops what arrives out of order.
        sent_monotonic_s: the replica's monotonic clock (comparable only within one node).
        draining: the replica takes no new requests.
        snapshot: see Snapshot.
    """

    replica_id: str
    sequence: int
    sent_monotonic_s: float
    draining: bool
    snapshot: Snapshot
