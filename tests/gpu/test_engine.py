"""Whole engines on a card: texts do not show whether tokens were moved, with graphs and without, in either backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.card import needs_gpu
from vtoken.core.config import VTokenConfig
from vtoken.engine.offline import Completion, OfflineEngine

pytestmark = [*needs_gpu, pytest.mark.timeout(1800)]

PROMPTS = [f"{'Tell me a long story about the sea. ' * (3 + 2 * i)}Ship number {i} left" for i in range(8)]
ENGINE: dict[str, Any] = {
    "block_size": 16, "max_model_len": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 512,
    "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.3,
    "distributed_executor_backend": "mp",  # a process of its own: the next engine finds the card empty
}  # fmt: skip


def run(model: Path, vtoken: dict[str, Any], **engine: Any) -> tuple[list[Completion], dict[str, Any]]:
    """All prompts together; texts, and the worker's check of itself."""
    policy = {"policy": "random", "budget_tokens": 96, "protect_recent": 32, **vtoken.pop("policy", {})}
    config = VTokenConfig.from_mapping({"experimental_gpu": True, "policy": policy, **vtoken})
    started = OfflineEngine(str(model), config, **{**ENGINE, **engine})
    try:
        return started.run(PROMPTS, max_tokens=160, ignore_eos=True), started.worker("vtoken_check")
    finally:
        started.close()


@pytest.mark.parametrize(
    ("dtype", "enforce_eager", "ahead"),
    [("bfloat16", False, True), ("bfloat16", True, False), ("float32", False, True)],
    ids=["FlashAttention in graphs", "FlashAttention, one step at a time", "Triton in graphs"],
)
@pytest.mark.parametrize("relocation", [{}, {"relocation": "lazy", "headroom_blocks": 8, "theta_f": 0.1}], ids=str)
def test_texts_do_not_show_whether_tokens_were_moved(
    model_dir: Path, relocation: dict[str, Any], dtype: str, enforce_eager: bool, ahead: bool
) -> None:
    engine = {"dtype": dtype, "enforce_eager": enforce_eager, "async_scheduling": ahead}
    strict = {"reader": "strict", "check_moves": 1.0, "poison_released": True}
    naive, _ = run(model_dir, {"variant": "naive", **strict}, **engine)
    moved, checked = run(model_dir, {**relocation, **strict}, **engine)
    assert moved == naive
    assert checked["moves_total"] > 0
    assert checked["blocks_released_total"] > 0
    assert (checked["move_check_failures_total"], checked["degraded"]) == (0, 0)


def test_in_float32_vllms_own_kernel_over_dense_rows_says_what_the_strict_reader_says(model_dir: Path) -> None:
    strict, _ = run(model_dir, {"reader": "strict"}, dtype="float32")
    dense, checked = run(model_dir, {"reader": "auto"}, dtype="float32")
    assert checked["moves_total"] > 0
    same = sum(one == other for one, other in zip(strict, dense, strict=True))
    assert same >= len(PROMPTS) - 1, "sums of another order may turn a near-tie"


def test_a_policy_that_looks_at_attention_forgets_and_nobody_waits_for_its_scores(model_dir: Path) -> None:
    texts, checked = run(model_dir, {"policy": {"policy": "h2o"}, "check_moves": 0.0}, dtype="bfloat16",
                         enforce_eager=False)  # fmt: skip
    assert all(len(text.token_ids) == 160 for text in texts)
    assert checked["tokens_evicted_total"] > 0
    assert checked["score_bytes"] > 0
    assert checked["details"]["host_syncs_total"][""] == 0
