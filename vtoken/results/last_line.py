"""The end of a command that measures or judges: its last line, its result file, its exit status."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

from vtoken.core.errors import ConfigError
from vtoken.results.files import RESULTS, Result, write
from vtoken.results.machine import machine, portable, versions
from vtoken.results.outcome import Outcome


def add_arguments(parser: argparse.ArgumentParser, out_help: str = "") -> None:
    """Declare `--out` and `--record`; `out_help` says what else the command writes to the former."""
    parser.add_argument("--out", metavar="DIR", help=f"directory for the result file (ID.json, ID.csv){out_help}")
    parser.add_argument("--record", action="store_true", help=f"write the result file to {RESULTS}, to be committed")
    parser.add_argument("--note", default="", help="for the result file: what else one must know to read the figures")


def directory(arguments: argparse.Namespace) -> Path | None:
    """Where the result file goes, if anywhere; asked before anything is measured.

    Raises:
        ConfigError: `--record` outside of a checkout, or together with `--out`.
    """
    if not arguments.record:
        return Path(arguments.out) if arguments.out else None
    if arguments.out:
        raise ConfigError("--record", "--out", "one of the two", f"--record is --out {RESULTS}.")
    if not RESULTS.parent.is_dir():
        raise ConfigError("--record", str(RESULTS), "a directory of the checkout", "Run it from the repository's top.")
    return RESULTS


def finish(outcome: Outcome, arguments: argparse.Namespace) -> int:
    """Print the last line, write the result file where one is asked for; 0 if the bars hold, 1 if not."""
    line = outcome.line(portable(["vtoken", *sys.argv[1:]]))
    print(json.dumps(line), flush=True)  # first: a full disk must not cost an hour's figures
    keep(outcome, arguments, line["command"])
    return 0 if outcome.passed else 1


def _spare_full(path: Path) -> None:
    """A shorter run does not take the place of the one that counts."""
    if path.is_file() and not Result.from_text(path.read_text(encoding="utf-8"), path.name).quick:
        raise ConfigError("--record", "--quick", f"a full run, for {path} is one", "Keep this run with --out DIR.")


def keep(outcome: Outcome, arguments: argparse.Namespace, command: str) -> None:
    """Write the result file where one is asked for.

    Raises:
        ConfigError: a shorter run would replace a full one in `docs/results`.
    """
    out = directory(arguments)
    if out is None:
        return
    line, today = outcome.line(command), date.today().isoformat()  # noqa: DTZ011  # the day on this machine's calendar
    passed, place, installed = line.pop("pass"), machine(), versions()
    result = Result(**line, passed=passed, date=today, machine=place, versions=installed, note=arguments.note)
    if arguments.record and result.quick:
        _spare_full(out / f"{result.id}.json")
    path = write(out, result, outcome.samples)
    print(f"vtoken: wrote {path}", file=sys.stderr)
