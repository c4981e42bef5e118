"""`vtoken simulate`: the checks, one fleet on one trace, or the study of routers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from vtoken.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--data", default=os.environ.get("VTOKEN_DATA"), help="directory with traces and latency grids")
    parser.add_argument("--check", action="store_true", help="compare with a measured run and with measured capacities")


def run(arguments: argparse.Namespace) -> int:
    """Run what was asked for; 0, or 1 when a bar is missed.

    Raises:
        ConfigError: no data directory, or a file is missing in it.
    """
    if not arguments.data:
        raise ConfigError("data", arguments.data, "a directory with traces (--data DIR or VTOKEN_DATA)")
    data = Path(arguments.data)
    if arguments.check:
        from vtoken.simulate.check import check

        values, holds = check(data)
        return report("simulate-check", values, holds=holds)
    raise ConfigError("simulate", "nothing", "--check")


def report(name: str, values: dict[str, Any], *, holds: bool) -> int:
    """Print the last line; the exit status."""
    line = {"id": name, "pass": holds, "values": values, "command": " ".join(["vtoken", *sys.argv[1:]])}
    print(json.dumps(line), flush=True)
    return 0 if holds else 1
