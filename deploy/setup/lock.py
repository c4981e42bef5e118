#!/usr/bin/env python3
"""Regenerate constraints-cpu.txt and constraints-gpu.txt: what pip would install today, without installing it.

    make lock

Run it after a change of dependencies in pyproject.toml, read the difference, run `make check test`, commit both files.
Everything comes from wherever pip is configured to look.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETUP = Path(__file__).resolve().parent
EXTRAS = {"cpu": "cpu,dev,dashboards,bench", "gpu": "gpu,dev,dashboards,bench"}
HEADER = """\
# Exact versions of everything in the {kind} environment. Written by `make lock`; do not edit.
# No local parts such as +cpu: a constraint without one accepts every build of that version.
"""


def resolve(python: Path, requirements: list[str], scratch: Path, find_links: Path | None = None) -> str | None:
    """Ask pip for a full resolution; returns the constraint lines, or None if pip finds none."""
    report = scratch / "report.json"
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        str(report),
    ]
    environment = dict(os.environ)
    if find_links is not None:
        environment["PIP_FIND_LINKS"] = str(find_links)
    result = subprocess.run([*command, *requirements], cwd=ROOT, env=environment, check=False)
    if result.returncode != 0:
        return None
    items = [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return constraint_lines({item["name"]: item["version"] for item in items})


def constraint_lines(versions: dict[str, str]) -> str:
    """`name==version` lines, names normalised and sorted, without this project and without local version parts."""
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version.partition("+")[0] for name, version in versions.items()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()) if name != "vtoken")


def main() -> int:
    """Resolve both environments and write both files; leaves a file as it was if its resolution fails."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    torch = next(item for item in dependencies if item.startswith("torch=="))
    failed = []
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        subprocess.run([sys.executable, "-m", "venv", str(scratch / "venv")], check=True)
        python, nowhere = scratch / "venv" / "bin" / "python", scratch / "empty"
        nowhere.mkdir()
        for kind, extras in EXTRAS.items():
            project = [f".[{extras}]"]
            print(f"resolving the {kind} environment (about a minute)", flush=True)
            if kind == "cpu":
                # uv is bootstrap.py's fallback. Without a +cpu build the pins are a superset, which does no harm.
                named = resolve(python, [f"{torch}+cpu", "uv", *project], scratch)
                lines = named or resolve(python, ["uv", *project], scratch)
            else:
                # A local folder of CPU wheels would win over the CUDA build, for +cpu counts as the newer version.
                lines = resolve(python, project, scratch, find_links=nowhere)
            if lines is None:
                failed.append(kind)
                continue
            (SETUP / f"constraints-{kind}.txt").write_text(HEADER.format(kind=kind) + lines, encoding="utf-8")
    if failed:
        print(f"pip found no resolution for: {', '.join(failed)}; those files are as they were", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
