"""`vtoken check MODEL`: the capability matrix for a model on this machine."""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.table import Table

from vtoken.core.config import VTokenConfig
from vtoken.engine.args import engine_args
from vtoken.engine.capabilities import matrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("model", help="model directory or hub name")
    parser.add_argument("--dtype", default="auto", help="as in vLLM (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Print every check; 0 when all are supported, 1 otherwise. Starts no engine."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import EngineArgs

    settings = engine_args(VTokenConfig(), dtype=arguments.dtype, block_size=arguments.block_size)
    checks = matrix(EngineArgs(model=arguments.model, **settings).create_engine_config())
    table = Table("feature", "found", "", "to change it", title=f"vToken on {arguments.model}")
    for check in checks:
        table.add_row(
            check.feature, check.found, "ok" if check.supported else "refused", "" if check.supported else check.fix
        )
    Console(width=120).print(table)
    return 0 if all(check.supported for check in checks) else 1
