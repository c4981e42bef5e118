"""Workloads from files of a data directory, and generated ones.

    azure      AzureLLMInferenceTrace_conv.csv              production chat: times and lengths
    mooncake   conversation_trace_first.jsonl               long contexts, ids of 512-token prefixes
    burstgpt   BurstGPT_1_first400.csv                      a campus service at night
    sharegpt   sharegpt_llama31_300_blk16.jsonl             chat, ids of 16-token prefixes
    mixed      workload_me2_01_mixed.jsonl                  long prompts, long outputs
    generated  no file: Poisson arrivals, log-normal lengths, shared system prompts

Files are found anywhere below the directory by their names.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.core.errors import ConfigError
from vtoken.simulate.workload import Workload, workload


def find(data: Path, name: str) -> Path:
    """The file of that name in a data directory.

    Raises:
        ConfigError: it is not there.
    """
    found = sorted(data.rglob(name))
    if not found:
        raise ConfigError("data", str(data), f"a directory with {name} in it or below it")
    return found[0]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def azure(data: Path) -> Workload:
    """Azure's conversation trace of 2023."""
    rows = _rows(find(data, "AzureLLMInferenceTrace_conv.csv"))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return workload(
        "azure", np.array(times) - times[0], [int(row["ContextTokens"]) for row in rows],
        [int(row["GeneratedTokens"]) for row in rows],
    )  # fmt: skip


def mooncake(data: Path) -> Workload:
    """Mooncake's conversation trace, with prefix ids."""
    rows = _lines(find(data, "conversation_trace_first.jsonl"))
    return workload(
        "mooncake", [row["timestamp"] / 1e3 for row in rows], [row["input_length"] for row in rows],
        [row["output_length"] for row in rows], [row["hash_ids"] for row in rows], 512,
    )  # fmt: skip


def burstgpt(data: Path) -> Workload:
    """The beginning of BurstGPT; failures (no tokens) are dropped."""
    rows = _rows(find(data, "BurstGPT_1_first400.csv"))
    return workload(
        "burstgpt", [float(row["Timestamp"]) for row in rows], [int(row["Request tokens"]) for row in rows],
        [int(row["Response tokens"]) for row in rows],
    )  # fmt: skip


def sharegpt(data: Path) -> Workload:
    """ShareGPT lengths as LLMServingSim prepared them."""
    rows = _lines(find(data, "sharegpt_llama31_300_blk16.jsonl"))
    return workload(
        "sharegpt", [row["timestamp"] / 1e3 for row in rows], [row["input_length"] for row in rows],
        [row["output_length"] for row in rows], [row["hash_ids"] for row in rows], 16,
    )  # fmt: skip


def mixed(data: Path) -> Workload:
    """LLMServingSim's mix with long outputs."""
    rows = _lines(find(data, "workload_me2_01_mixed.jsonl"))
    return workload(
        "mixed", [row["arrival_time_ns"] / 1e9 for row in rows], [row["input_toks"] for row in rows],
        [row["output_toks"] for row in rows],
    )  # fmt: skip


def generated(
    count: int, requests_per_s: float, seed: int = 0, prompt_mean: float = 900.0, output_mean: float = 250.0,
    families: int = 0, family_tokens: int = 256,
) -> Workload:  # fmt: skip
    """Poisson arrivals, log-normal lengths (sigma 1) of given means; `families` system prompts, Zipf-like, if any."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / requests_per_s, count))
    prompt, output = (
        np.maximum(1, (mean * rng.lognormal(-0.5, 1.0, count)).astype(np.int64)) for mean in (prompt_mean, output_mean)
    )
    prefixes: list[list[int]] = []
    if families:
        chosen = np.minimum(rng.zipf(1.5, count), families) - 1
        span = family_tokens // 16
        prefixes = [list(range(int(which) * span, (int(which) + 1) * span)) for which in chosen]
        prompt += family_tokens
    return workload("generated", arrival - arrival[0], prompt, output, prefixes)


def _generated(data: Path) -> Workload:  # noqa: ARG001 - no file
    return generated(10_000, 10.0)


TRACES: dict[str, Callable[[Path], Workload]] = {
    "azure": azure, "mooncake": mooncake, "burstgpt": burstgpt, "sharegpt": sharegpt, "mixed": mixed,
    "generated": _generated,
}  # fmt: skip
"""By name; each takes the data directory."""
