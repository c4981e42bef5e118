"""`python -m vtoken.device.gpu_report`: whether the CUDA path is right and fast on this card. Needs torch and triton.

    python -m vtoken.device.gpu_report --json report.json       on a machine with a GPU; a few minutes
    python -m vtoken.device.gpu_report --interpret              anywhere: small, interpreted, without times

Exit status: 0 all targets met, 1 one missed or a result wrong, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vtoken.device.gpu_report_bench import Line

EXIT_MISSED, EXIT_NO_GPU = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything, print a table, write JSON if asked; the exit status."""
    about = "Whether vToken's CUDA path is right and fast on this card."
    parser = argparse.ArgumentParser(prog="python -m vtoken.device.gpu_report", description=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
    parser.add_argument("--interpret", action="store_true", help="on the CPU, interpreted: right or wrong, no times")
    arguments = parser.parse_args(argv)
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported, below

    import torch

    if not arguments.interpret and not torch.cuda.is_available():
        print("gpu_report: there is no CUDA device here, so nothing was measured. --interpret checks the results of "
              "the kernels on the CPU.", file=sys.stderr)  # fmt: skip
        return EXIT_NO_GPU
    report = run(interpret=arguments.interpret)
    print(table(report["lines"]))
    if arguments.json is not None:
        text = json.dumps({**report, "lines": [asdict(line) for line in report["lines"]]}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    missed = [line.name for line in report["lines"] if line.met is False]
    print(f"{len(report['lines'])} lines, {len(missed)} missed" + "".join(f"\n  {name}" for name in missed))
    return EXIT_MISSED if missed else 0


def run(*, interpret: bool) -> dict[str, Any]:
    """The report: card, versions, and lines."""
    from vtoken.device import gpu_report_checks, gpu_report_times
    from vtoken.device.gpu_report_bench import CudaBench, InterpretedBench

    bench = InterpretedBench() if interpret else CudaBench()
    lines = [*gpu_report_checks.lines(bench), *gpu_report_times.lines(bench)]
    return {"card": bench.card(), "versions": bench.versions(), "interpreted": interpret, "lines": lines}


def table(lines: Sequence[Line]) -> str:
    """The lines, one under the other."""
    width = max(len(line.name) for line in lines)
    rows = []
    for line in lines:
        verdict = {None: "", True: "ok", False: "MISSED"}[line.met]
        target = f"  target {line.target}" if line.target else ""
        rows.append(f"{line.name:<{width}}  {line.shown:>16}  {verdict:<6}{target}".rstrip())
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
