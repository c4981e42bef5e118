"""`vtoken bench report`: the page, its pictures and their numbers."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from vtoken.bench.report import capacity, cost, fleet, quick
from vtoken.bench.report.figure import Figure, Inputs, write_picture
from vtoken.bench.report.page import Drawn, page
from vtoken.results.files import RESULTS, write_csv

HELP = "one HTML page with the paper's figures re-drawn from the result files, PNG and CSV beside it"
FIGURES: tuple[Figure, ...] = (*capacity.FIGURES, *cost.FIGURES, *fleet.FIGURES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="result files (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="measure in short first, on this machine (20 minutes)")
    parser.add_argument("--model", help="model directory, for --quick")
    parser.add_argument("--no-pictures", action="store_true", help="tables instead; needs no matplotlib")


def run(arguments: argparse.Namespace) -> int:
    """Write the report; 0.

    Raises:
        ConfigError: a result file is broken.
        UnsupportedError: there is no matplotlib.
    """
    out: Path = arguments.out
    repeated = None
    if arguments.quick:
        measured = out / "quick"
        measured.mkdir(parents=True, exist_ok=True)
        quick.measure(measured, arguments.model, Console(stderr=True).log)
        repeated = Inputs.of(measured)
    inputs = Inputs.of(arguments.results, *([out / "quick"] if arguments.quick else []))
    out.mkdir(parents=True, exist_ok=True)
    drawn = [_drawn(figure, inputs, out, pictures=not arguments.no_pictures) for figure in FIGURES]
    path = out / "report.html"
    path.write_text(page(drawn, inputs, repeated), encoding="utf-8")
    print(path)
    return 0


def _drawn(figure: Figure, inputs: Inputs, out: Path, *, pictures: bool) -> Drawn:
    rows = figure.rows(inputs)
    picture, numbers = out / f"{figure.key}.png", out / f"{figure.key}.csv"
    if not rows:
        picture.unlink(missing_ok=True)
        numbers.unlink(missing_ok=True)
        return Drawn(figure, rows, None)
    write_csv(numbers, rows)
    if pictures:
        write_picture(figure, rows, picture)
    return Drawn(figure, rows, picture if pictures else None)
