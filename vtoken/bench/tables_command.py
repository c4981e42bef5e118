"""`vtoken bench tables`: the tables of README.md, docs/results.md and docs/simulator.md, made of the result files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vtoken.bench.tables import PAGES, TABLES
from vtoken.results import files
from vtoken.results.pages import filled

HELP = "write the tables of README.md, docs/results.md and docs/simulator.md from docs/results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is not what it should be")
    parser.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="of the repository (default: here)")


def run(arguments: argparse.Namespace) -> int:
    """Write, or with `--check` compare; 0, or 1 if a page was stale.

    Raises:
        ConfigError: a result file is broken, or a page asks for a table that nobody makes.
    """
    results = files.read(arguments.root / files.RESULTS)
    stale = 0
    for name in PAGES:
        page = arguments.root / name
        text = page.read_text(encoding="utf-8")
        wanted = filled(text, TABLES, results, str(name))
        if wanted == text:
            continue
        if arguments.check:
            stale = 1
            print(f"vtoken: {name} is not what `vtoken bench tables` writes", file=sys.stderr)
        else:
            page.write_text(wanted, encoding="utf-8")
            print(name)
    return stale
