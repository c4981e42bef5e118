"""`vtoken bench report`: one page out of result files, its numbers beside it, and what is missing said plainly."""

from __future__ import annotations

import csv
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from vtoken.bench.command import BENCHMARKS
from vtoken.bench.report import quick
from vtoken.bench.report.figure import Inputs
from vtoken.bench.report.report_command import FIGURES
from vtoken.bench.tables.overview import LINES
from vtoken.cli import main
from vtoken.results import files
from vtoken.results.files import Result

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / files.RESULTS
PAPER = ("Fig. 1", "Fig. 7", "Fig. 8", "Fig. 9", "Fig. 10", "Fig. 11")


def written(out: Path, *words: str, results: Path = COMMITTED) -> str:
    """The page."""
    given = ["bench", "report", "--results", str(results), "--out", str(out), *words]
    assert main(given) == 0
    return (out / "report.html").read_text(encoding="utf-8")


def idle(ratio: float = 1.016, **changes: object) -> Result:
    measured = {"median": ratio, "interval": [ratio - 0.001, ratio + 0.001], "pairs": 5}
    values = {
        "8": {
            "substrate_share": 0.002, "cpu_per_token_over_native": measured, "wall_per_token_over_native": measured,
            "outputs_identical": True,
        },
        "connector": {"8": measured}, "control": {"8": measured},
    }  # fmt: skip
    given = {
        "id": "idle", "passed": False, "values": values, "interval": {"8.x": [0, 1]}, "command": "vtoken bench idle",
        "date": "2026-11-30", "machine": "2 cores <&>", "versions": {"torch": "2.13"}, "note": "at night",
    }  # fmt: skip
    return Result(**{**given, **changes})


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = written(tmp_path, "--no-pictures")
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert "@import" not in page
    assert "<script" not in page
    assert set(re.findall(r'href="#([^"]+)"', page)) == set(re.findall(r'<h2 id="([^"]+)"', page))


def test_every_element_of_the_page_is_closed(tmp_path: Path) -> None:
    opened: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in {"meta", "img"}:
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Checker().feed(written(tmp_path, "--no-pictures"))
    assert opened == []


def test_every_figure_of_the_paper_has_its_section_with_the_papers_numbers(tmp_path: Path) -> None:
    page = unescape(written(tmp_path, "--no-pictures"))
    for number in PAPER:
        assert f">{number}:" in page
    for figure in FIGURES:
        assert figure.method in page
        assert figure.paper in page


def test_every_figure_names_a_command_that_exists() -> None:
    simulated = {"simulate-check", "simulate-study", "simulate-sensitivity"}
    assert {figure.source for figure in FIGURES} <= BENCHMARKS.keys() | simulated
    assert set(quick.ORDER) <= BENCHMARKS.keys()


def test_numbers_lie_beside_the_page_as_drawn(tmp_path: Path) -> None:
    files.write(tmp_path, idle())
    written(tmp_path / "out", "--no-pictures", results=tmp_path)
    with (tmp_path / "out" / "fig-11-idle.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    beside = ["an empty connector, CPU seconds", "control: unmodified, CPU seconds"]
    assert [row["measure"] for row in rows] == ["CPU seconds", "wall-clock", *beside]
    assert {row["ratio"] for row in rows} == {"1.016"}
    assert {(row["ratio_low"], row["ratio_high"]) for row in rows} == {("1.015", "1.017")}


def test_a_figure_without_data_names_the_command_and_leaves_no_old_picture(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for name in ("fig-11-idle.png", "fig-11-idle.csv"):
        (tmp_path / name).write_text("old")
    page = written(tmp_path, "--no-pictures", results=tmp_path / "results")
    assert page.count("No data yet") == len(FIGURES)
    assert "<code>vtoken bench idle --record</code> makes it" in page
    assert not list(tmp_path.glob("fig-11*"))
    assert page.count("not measured;") == len(LINES)


def test_a_missed_bar_is_said_with_what_was_found_and_where_it_was_measured(tmp_path: Path) -> None:
    files.write(tmp_path, idle())
    page = written(tmp_path / "out", "--no-pictures", results=tmp_path)
    short = page[: page.index('id="fig-01')]
    assert "idle cost: does not hold. Bar: at most 1 % inside" in short
    assert "CPU seconds 1.6 %" in short
    section = page[page.index('id="fig-11-idle"') : page.index('id="cpu-cost"')]
    for words in ("2026-11-30", "2 cores &lt;&amp;&gt;", "torch 2.13", "at night", "95 % bootstrap intervals"):
        assert words in section


def everything(directory: Path) -> Path:
    """Committed results, and made-up ones of what is not committed."""
    shutil.copytree(COMMITTED, directory)
    one = {"waste": 0.5, "half_empty_share": 0.6, "blocks_per_request": 20.0, "moves_per_freed_block": 0.0}
    policies = {name: dict.fromkeys(("naive", "lazy", "eager"), one) for name in ("random", "h2o")}
    sweep = [
        {"variant": variant, "concurrency": count, "tokens_per_s": 10.0 * count, "p95_s": 1.0 * count}
        for variant in ("naive", "eager") for count in (4, 8)
    ]  # fmt: skip
    files.write(directory, idle(id="waste", values={"generation": policies, "long prompts": policies}))
    files.write(directory, idle(id="sla", values={"level_s": 8.0, "over_naive": {"eager": 1.5}, "sweep": sweep}))
    one = {"hit_rate": 0.5, "late_hit_rate": 0.5, "blocks": 100.0, "shared_blocks": 9.0}
    files.write(directory, idle(id="prefix", values={"4": dict.fromkeys(("naive", "eager"), one), "failures": []}))
    return directory


def test_every_figure_can_be_drawn_and_is_inside_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = everything(tmp_path / "results")
    page = written(tmp_path / "out", results=results)
    assert page.count("data:image/png;base64,") == len(FIGURES)
    assert "No data yet" not in page
    for figure in FIGURES:
        assert (tmp_path / "out" / f"{figure.key}.png").stat().st_size > 1000
        assert len(files.read_csv(tmp_path / "out" / f"{figure.key}.csv")) == len(figure.rows(Inputs.of(results)))


def test_a_repetition_fills_gaps_and_never_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(tmp_path / "results", idle())

    def measure(out: Path, model: str | None, log: object) -> None:
        files.write(out, idle(1.5, command="vtoken bench idle --quick"))
        files.write(out, idle(id="speed", values={"512": {"random": {"whole": {"median": 2.0}}}}))

    monkeypatch.setattr(quick, "measure", measure)
    page = written(tmp_path / "out", "--no-pictures", "--quick", results=tmp_path / "results")
    assert "CPU seconds 1.6 %" in page[: page.index('id="fig-01')]
    repeated = page[page.index("Repeated on this machine") :]
    assert "CPU seconds 1.6 %" in repeated
    assert "CPU seconds 50.0 %" in repeated
    assert "not within the time: bookkeeping, routing, copy, rows, waste, frontier.</p>" in repeated
    assert "No data yet" not in page[page.index('id="crossover"') : page.index('id="calibration"')]


def test_a_quick_repetition_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(quick, "_one", lambda name, *_: ran.append(name))
    files.write(tmp_path, idle(id=quick.ORDER[0]))
    quick.measure(tmp_path, None, lambda _: None)
    assert ran == list(quick.ORDER[1:])


def test_a_quick_repetition_starts_nothing_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(quick, "_one", lambda name, *_: ran.append(name))
    monkeypatch.setattr(quick, "MINUTES", -1.0)
    said: list[str] = []
    quick.measure(tmp_path, None, said.append)
    assert ran == []
    assert len(said) == len(quick.ORDER)
