"""Tables of what was measured on whole engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vtoken.bench.tables.cells import MISSING, code, dig, identical, number, percent, ratio, table_of, values_of
from vtoken.results.pages import Results


def _scenes(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((name, scene) for name, scene in values.items() if isinstance(scene, Mapping))


# ---- capacity -------------------------------------------------------------------------------------------------------

CAPACITY_HEAD = [
    "scene", "naive", "lazy", "eager", "tokens per second over no eviction, same blocks and load",
    "moves per freed block", "excess F", "excess blocks",
]  # fmt: skip


def capacity(results: Results) -> str:
    """Q4: the largest concurrency without a preemption, by scene."""

    def row(name: str, scene: Mapping[str, Any]) -> list[str]:
        over = number(scene.get("throughput_over_native"), 2)
        eager, native = (dig(scene, "tokens_per_s", variant) for variant in ("eager", "native"))
        speeds = f"{eager:.1f} / {native:.1f} = {over}" if eager and native else over
        moves = number(scene.get("moves_per_freed_block"), 1)
        if lazy := scene.get("lazy_moves_per_freed_block"):
            moves += f" (lazy {lazy:.1f})"
        counts = [str(scene[variant]) if variant in scene else "" for variant in ("naive", "lazy")]
        waste, blocks = number(scene.get("excess_waste"), 3), number(scene.get("excess_blocks_per_request"), 1)
        return [name, *counts, f"**{scene.get('eager', MISSING)}**", speeds, moves, waste, blocks]

    rows = [row(*one) for one in _scenes(values_of(results, "frontier"))]
    return table_of(results, "frontier", CAPACITY_HEAD, rows)


# ---- waste ----------------------------------------------------------------------------------------------------------

WASTE_HEAD = [
    "workload", "policy", "F: naive", "lazy", "eager", "blocks at most half full: naive", "eager",
    "blocks per request: naive", "lazy", "eager", "change", "moves per freed block: lazy", "eager",
]  # fmt: skip


def waste(results: Results) -> str:
    """Q1, Q2: what is trapped, and what is returned."""

    def row(workload: str, policy: str, variants: Mapping[str, Mapping[str, float]]) -> list[str]:
        naive, lazy, eager = (variants[name] for name in ("naive", "lazy", "eager"))
        return [
            workload, code(policy), *(number(one["waste"], 3) for one in (naive, lazy, eager)),
            *(percent(one["half_empty_share"], 0) for one in (naive, eager)),
            *(number(one["blocks_per_request"], 1) for one in (naive, lazy, eager)),
            percent(eager["blocks_per_request"] / naive["blocks_per_request"] - 1),
            *(number(one["moves_per_freed_block"], 1) for one in (lazy, eager)),
        ]  # fmt: skip

    rows = [
        row(workload, policy, variants)
        for workload, policies in _scenes(values_of(results, "waste"))
        for policy, variants in policies.items()
    ]
    return table_of(results, "waste", WASTE_HEAD, rows)


# ---- service level --------------------------------------------------------------------------------------------------


def sla(results: Results) -> str:
    """Q3: every number of clients, and whether it keeps the service level."""
    values = values_of(results, "sla")
    level_s = values.get("level_s", 0.0)
    rows = [
        [
            one["variant"], str(one["concurrency"]), number(one["tokens_per_s"], 1), number(one["p50_s"], 2),
            number(one["p95_s"], 2), "yes" if one["p95_s"] <= level_s else "no", number(one["preemptions"]),
        ]
        for one in values.get("sweep", [])
    ]  # fmt: skip
    head = [
        "variant", "clients", "tokens per second", "median latency, s", "95th percentile, s",
        f"within {number(level_s, 2)} s", "preemptions",
    ]  # fmt: skip
    return table_of(results, "sla", head, rows)


# ---- prefix caching -------------------------------------------------------------------------------------------------


def prefix(results: Results) -> str:
    """Q7, by how many share a beginning."""
    rows = [
        [
            sharing, *(percent(runs[variant]["hit_rate"]) for variant in ("naive", "eager")),
            *(percent(runs[variant]["late_hit_rate"]) for variant in ("naive", "eager")),
            *(number(runs[variant]["blocks"], 1) for variant in ("naive", "eager")),
            percent(runs["eager"]["blocks"] / runs["naive"]["blocks"] - 1),
            *(number(runs[variant]["shared_blocks"], 1) for variant in ("naive", "eager")),
        ]
        for sharing, runs in _scenes(values_of(results, "prefix"))
    ]  # fmt: skip
    head = [
        "requests per beginning", "hit rate: naive", "eager", "of late ones: naive", "eager", "blocks in use: naive",
        "eager", "change", "shared blocks: naive", "eager",
    ]  # fmt: skip
    return table_of(results, "prefix", head, rows)


# ---- identity -------------------------------------------------------------------------------------------------------

IDENTITY = [
    ("idle plugin with unmodified vLLM, float32, blocks of 32", ("plugin", "idle")),
    ("naive with eager, strict reader", ("placement", "eager")),
    ("naive with lazy", ("placement", "lazy")),
    ("naive with lazy whose copies take up to a second", ("placement", "slow copies")),
    ("a request alone with the same in the batch of all: idle plugin", ("company", "idle")),
    ("the same, strict reader", ("company", "strict")),
    ("the same, `reader: auto`", ("company", "auto, float32")),
    ("`reader: auto` with a dense pass over the kept tokens, float32", ("reference", "float32")),
    ("the same in bfloat16", ("reference", "bfloat16")),
    ("the same under each of the ten policies, float32", ("policies", "float32")),
    ("the same in bfloat16", ("policies", "bfloat16")),
]
"""What is compared, and where the result file has it."""


def identity(results: Results) -> str:
    """Q8: what must not show in an output, and log-probabilities beside a dense pass."""
    values = values_of(results, "identity")
    rows = [[what, identical(dig(values, *path)), *_differences(dig(values, *path))] for what, path in IDENTITY]
    head = ["comparison", "identical, or within the tolerance", "largest difference", "mean", "log-probabilities"]
    return table_of(results, "identity", head, rows)


def _differences(part: Any) -> list[str]:
    """Of log-probabilities: the largest, the mean and how many were compared; of a part by policy, over all."""
    found = [one for one in (part, *(part or {}).values()) if isinstance(one, Mapping) and "log_probs" in one]
    if not found:
        return ["", "", ""]
    if part in found:
        found = [part]
    count = sum(one["log_probs"] for one in found)
    mean = sum(one["mean_difference"] * one["log_probs"] for one in found) / count
    return [f"{max(one['max_difference'] for one in found):.2g}", f"{mean:.2g}", number(count)]


def choices(results: Results) -> str:
    """Q8: tokens forgotten by each policy, and those that a dense pass's own scores would have forgotten."""
    policies = dig(values_of(results, "identity"), "policies") or {}
    rows = [
        [code(name), *(number(dig(policies, dtype, name, key)) for dtype in DTYPES for key in CHOSEN)]
        for name, one in (policies.get("float32") or {}).items()
        if isinstance(one, Mapping)
    ]
    head = ["policy", "forgotten, float32", "as the dense pass says", "forgotten, bfloat16", "as the dense pass says"]
    return table_of(results, "identity", head, rows)


DTYPES = ("float32", "bfloat16")
CHOSEN = ("forgotten", "by_our_scores")


# ---- soak -----------------------------------------------------------------------------------------------------------

SOAK = {
    "engine steps": "steps", "requests": "requests", "aborted": "aborted", "preemptions": "preemptions",
    "tokens evicted": "evicted", "tokens moved": "moves", "blocks released while decoding": "blocks_released",
    "plans compared byte by byte": "checks", "of them different": "failures",
    "outputs compared with the same request alone": "probes_compared", "of them different ": "probes_wrong",
    "checks of all invariants": "worker_checks", "disagreements about blocks": "disagreements",
    "blocks leaked": "leaked_blocks", "tables left behind": "left_tables", "growth of memory, MiB": "growth_mib",
}  # fmt: skip


def soak(results: Results) -> str:
    """Counts by mode."""
    values = values_of(results, "soak")
    modes = [name for name, _ in _scenes(values)]
    rows = [
        [what.strip(), *(number(dig(values, mode, key), 1 if key == "growth_mib" else 0) for mode in modes)]
        for what, key in SOAK.items()
    ]
    return table_of(results, "soak", ["", *modes], rows)


# ---- cost -----------------------------------------------------------------------------------------------------------


def idle(results: Results) -> str:
    """Q5, by concurrency."""
    values = values_of(results, "idle")
    rows = [
        [
            concurrency, percent(one.get("substrate_share"), 2), ratio(one.get("cpu_per_token_over_native")),
            ratio(one.get("wall_per_token_over_native")), ratio(dig(values, "connector", concurrency)),
            ratio(dig(values, "control", concurrency)), "yes" if one.get("outputs_identical") else "**no**",
        ]
        for concurrency, one in _scenes(values) if "substrate_share" in one
    ]  # fmt: skip
    head = [
        "concurrency", "substrate's share of step time", "CPU seconds over unmodified", "wall-clock over unmodified",
        "an empty connector, CPU seconds", "control, CPU seconds", "outputs identical",
    ]  # fmt: skip
    return table_of(results, "idle", head, rows)


def speed(results: Results) -> str:
    """Q12, by context and policy."""
    rows = [
        [f"{int(context):,}", code(policy), *(ratio(one.get(key), 2) for key in ("whole", "whole_wall", "later"))]
        for context, policies in _scenes(values_of(results, "speed"))
        for policy, one in policies.items()
    ]
    return table_of(results, "speed", ["context", "policy", "tokens per CPU second", "wall", "later"], rows)


def scoring(results: Results) -> str:
    """What a policy's scores and choices cost."""
    rows = [
        [
            "control: `streaming_llm` against itself" if policy == "control" else code(policy),
            percent(one.get("inside"), 2), ratio(one.get("cpu")), ratio(one.get("wall")),
            ratio(one.get("prefill_cpu")),
        ]
        for policy, one in _scenes(values_of(results, "scoring"))
    ]  # fmt: skip
    head = ["policy", "more of the step time, timed inside", "CPU seconds over the baseline", "wall-clock", "prompts"]
    return table_of(results, "scoring", head, rows)
