"""The same prompts, block budget and evictions under one variant; run as a process, prints one JSON line.

    python -m vtoken.demo.comparison MODEL naive|vtoken-strict|vtoken

float32 and one fixed batch, so that texts can be compared: unmodified vLLM's bf16 output depends on
what else is in the batch. `naive` hides evicted tokens from attention and moves nothing; `vtoken-strict`
also reclaims, under the same strict reader; `vtoken` reclaims and reads dense rows with vLLM's kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from vtoken.core.config import VTokenConfig
from vtoken.core.telemetry import Snapshot
from vtoken.demo.prompts import QUESTIONS, conversation

TOKENS = 224
"""Generated per prompt."""

BLOCKS = 401
"""The pool, vLLM's null block included: naive needs most of it for 16 requests, and is not preempted."""

POLICY = {"policy": "random", "budget_tokens": 96, "protect_recent": 16, "interval_tokens": 16}

VARIANTS: dict[str, dict[str, Any]] = {
    "naive": {"variant": "naive", "reader": "strict"},
    "vtoken-strict": {"variant": "vtoken", "reader": "strict", "check_moves": 1.0},
    "vtoken": {"variant": "vtoken", "reader": "auto"},
}


@dataclass
class Measured:
    """What one variant did; blocks are counted at the step where most were in use.

    Attributes:
        texts: one per prompt. tokens_per_s: generated tokens per second of the whole run.
        peak_blocks: blocks in use, reserve included. blocks_per_request: held on average at that step.
        waste: mean F over the steps after the first eviction.
        preemptions, blocks_released, tokens_moved, tokens_evicted, checks, check_failures: totals.
    """

    texts: list[str] = field(default_factory=list)
    tokens_per_s: float = 0.0
    peak_blocks: int = 0
    blocks_per_request: float = 0.0
    waste: float = 0.0
    preemptions: int = 0
    blocks_released: int = 0
    tokens_moved: int = 0
    tokens_evicted: int = 0
    checks: int = 0
    check_failures: int = 0


class Watcher:
    """Keeps peaks and means of a run's snapshots, and shows progress on standard error."""

    def __init__(self, result: Measured) -> None:
        self._result = result
        self._wastes: list[float] = []
        self._shown_s = 0.0

    def __call__(self, snapshot: Snapshot) -> None:
        """Take in the state after one step."""
        result = self._result
        used = snapshot.capacity_blocks - snapshot.free_blocks
        if used > result.peak_blocks:
            result.peak_blocks = used
            result.blocks_per_request = snapshot.allocated_blocks / max(snapshot.tracked_requests, 1)
        if snapshot.tokens_evicted_total and snapshot.tracked_requests:
            self._wastes.append(snapshot.waste_ratio)
            result.waste = sum(self._wastes) / len(self._wastes)
        if time.monotonic() - self._shown_s > 1:
            self._shown_s = time.monotonic()
            print(f"{snapshot.steps_total} {snapshot.waste_ratio:.2f} {used}", file=sys.stderr, flush=True)


def measure(model: str, variant: str) -> Measured:
    """Run one variant."""
    from vtoken.engine.offline import OfflineEngine

    engine = OfflineEngine(
        model,
        VTokenConfig.from_mapping({"policy": POLICY, **VARIANTS[variant]}),
        dtype="float32", block_size=16, max_model_len=1024, max_num_seqs=len(QUESTIONS),
        num_gpu_blocks_override=BLOCKS, kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False,
    )  # fmt: skip
    result = Measured()
    try:
        prompts = [engine.chat_prompt(conversation(index)) for index in range(len(QUESTIONS))]
        engine.run(prompts[:1], max_tokens=4)  # the first steps of a process are not representative
        started = time.perf_counter()
        completions = engine.run(prompts, Watcher(result), max_tokens=TOKENS, ignore_eos=True)
        result.tokens_per_s = len(prompts) * TOKENS / (time.perf_counter() - started)
        result.texts = [completion.text for completion in completions]
        _take_totals(result, engine.snapshots.snapshot())
    finally:
        engine.close()
    return result


def _take_totals(result: Measured, last: Snapshot) -> None:
    result.preemptions = last.preemptions_total
    result.blocks_released = last.blocks_released_total
    result.tokens_moved = last.moves_total
    result.tokens_evicted = last.tokens_evicted_total
    result.checks = last.move_checks_total
    result.check_failures = last.move_check_failures_total


def main() -> int:
    """Measure the variant named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("variant", choices=VARIANTS)
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure(arguments.model, arguments.variant))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
