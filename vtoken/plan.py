"""`vtoken plan MODEL`: what fits on a GPU, by formula. Starts nothing and needs no GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vtoken.core.capacity import (
    GIB,
    GPU_MEMORY_BYTES,
    OVERHEAD_BYTES,
    PRESETS,
    Machine,
    ModelShape,
    Traffic,
    capacity,
)
from vtoken.core.checks import check_int, check_number
from vtoken.core.config import MAX_TOKENS, VTokenConfig
from vtoken.core.errors import ConfigError
from vtoken.core.policies import load_policy

GB = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("model", help=f"model directory with a config.json, or one of {', '.join(PRESETS)}")
    parser.add_argument("--gpu", default="h100", choices=sorted(GPU_MEMORY_BYTES), help="card (default: %(default)s)")
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="memory of another card, as CUDA shows it")
    parser.add_argument("--memory-share", type=float, nargs="+", default=[0.9], metavar="SHARE",
                        help="gpu_memory_utilization, one or more (default: 0.9)")  # fmt: skip
    parser.add_argument("--overhead-gib", type=float, default=OVERHEAD_BYTES / GIB, metavar="GIB",
                        help="memory beside weights and K/V (default: %(default)s)")  # fmt: skip
    parser.add_argument("--weights-gb", type=float, metavar="GB", help="weights, if not as config.json says")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="of a request (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=1024, help="of a request (default: %(default)s)")
    parser.add_argument(
        "--chunk-tokens", type=int, default=8192, help="largest chunk of a prompt (default: %(default)s)"
    )
    parser.add_argument("--policy", default="none", help="eviction policy (default: %(default)s)")
    parser.add_argument("--keep-ratio", type=float, help="share of a request's tokens that the policy keeps")
    parser.add_argument("--budget-tokens", type=int, help="tokens of a request that the policy keeps")
    parser.add_argument("--between-chunks", action="store_true", help="also evict between the chunks of a prompt")
    parser.add_argument("--relocation", default="eager", help="eager or lazy (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan for each share; 0.

    Raises:
        ConfigError: an option or a field of config.json that makes no sense.
        UnsupportedError: a model whose sizes follow other formulas.
    """
    found = plan(arguments)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _print(arguments, found)
    return 0


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan, JSON-ready; raises as `run`."""
    shape, config = _shape(arguments.model), _config(arguments)
    weights = shape.weights_bytes if arguments.weights_gb is None else int(
        check_number("weights-gb", arguments.weights_gb, 0.0, 1e6) * GB
    )  # fmt: skip
    size = check_int("block-size", arguments.block_size, 1, MAX_TOKENS)
    block_bytes = size * shape.kv_bytes_per_token
    traffic = Traffic(
        check_int("prompt-tokens", arguments.prompt_tokens, 1, MAX_TOKENS),
        check_int("output-tokens", arguments.output_tokens, 1, MAX_TOKENS),
        check_int("chunk-tokens", arguments.chunk_tokens, 1, MAX_TOKENS),
    )
    return {
        "model": arguments.model, "weights_bytes": weights, "kv_bytes_per_token": shape.kv_bytes_per_token,
        "block_bytes": block_bytes, "block_size": size, "policy": arguments.policy,
        "plans": [
            {"memory_share": share, **asdict(capacity(_machine(arguments, share).blocks(weights, block_bytes), size,
                                                      traffic, config))}
            for share in arguments.memory_share
        ],
    }  # fmt: skip


def _machine(arguments: argparse.Namespace, share: float) -> Machine:
    memory = GPU_MEMORY_BYTES[arguments.gpu]
    if arguments.memory_gib is not None:
        memory = int(check_number("memory-gib", arguments.memory_gib, 0.0, 1e6) * GIB)
    return Machine(memory, share, int(check_number("overhead-gib", arguments.overhead_gib, 0.0, 1e6) * GIB))


def _config(arguments: argparse.Namespace) -> VTokenConfig:
    options = {
        "policy": arguments.policy, "keep_ratio": arguments.keep_ratio, "budget_tokens": arguments.budget_tokens,
        "between_chunks": arguments.between_chunks,
    }  # fmt: skip
    config = VTokenConfig.from_mapping({"policy": options, "relocation": arguments.relocation}, prefix="plan")
    if config.policy.evicts:
        load_policy(config.policy.policy)
    return config


def _shape(model: str) -> ModelShape:
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        names = ", ".join(PRESETS)
        raise ConfigError("model", model, f"a directory with a config.json, or one of {names}", str(problem)) from None
    if not isinstance(raw, dict):
        raise ConfigError("config.json", type(raw).__name__, "a JSON object")
    return ModelShape.from_config(raw)


def _print(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    console = Console(width=120)
    console.print(
        f"{found['model']}: {found['weights_bytes'] / GB:.2f} GB of weights, "
        f"{found['kv_bytes_per_token'] / 1024:g} KiB of K/V per token, "
        f"{found['block_bytes'] / (1 << 20):g} MiB per block of {found['block_size']}"
    )
    console.print(
        f"requests of {arguments.prompt_tokens:,} + {arguments.output_tokens:,} tokens, policy {arguments.policy}"
    )
    table = Table(
        "share", "blocks", "in reserve", "blocks per request", "requests", "with reclamation: blocks", "requests"
    )
    for one in found["plans"]:
        table.add_row(
            f"{one['memory_share']:.2f}", f"{one['blocks']:,}", str(one["headroom_blocks"]), f"{one['whole_blocks']:,}",
            f"{one['requests_whole']:,}", f"{one['held_blocks']:,} (prompt {one['prompt_blocks']:,})",
            f"{one['requests_reclaimed']:,}",
        )  # fmt: skip
    console.print(table)
    console.print("By formula: nothing was measured. The engine prints the number of its blocks when it starts.")
