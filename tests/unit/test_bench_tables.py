"""Generated tables: every figure comes out of a result file, and the committed pages are what the files say."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from vtoken.bench.command import BENCHMARKS
from vtoken.bench.tables import PAGES, TABLES, cells
from vtoken.bench.tables.findings import FOUND
from vtoken.bench.tables.overview import LINES
from vtoken.bench.tables.questions import QUESTIONS
from vtoken.cli import main
from vtoken.core.errors import ConfigError
from vtoken.demo.comparison import Measured
from vtoken.demo.summary import outcome
from vtoken.results import files
from vtoken.results.files import Result
from vtoken.results.pages import BLOCK, filled, markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = "Before.\n\n<!-- table one: made -->\n\nold\n\n<!-- end of table -->\n\nAfter 1.5.\n"


@pytest.fixture(scope="module")
def committed() -> dict[str, Result]:
    return files.read(ROOT / files.RESULTS)


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_a_table_is_replaced_and_the_prose_around_it_is_not() -> None:
    made = filled(PAGE, {"one": lambda _: "| new |\n"}, {}, "page")
    assert made == PAGE.replace("old\n", "| new |\n")
    assert filled(made, {"one": lambda _: "| new |\n"}, {}, "page") == made


@pytest.mark.parametrize(
    "page", [PAGE.replace(" one:", " two:"), PAGE.replace("end of", "end"), PAGE + "<!-- table one -->"]
)
def test_a_page_with_an_unknown_or_endless_table_is_refused(page: str) -> None:
    with pytest.raises(ConfigError, match="page"):
        filled(page, {"one": lambda _: ""}, {}, "page")


def test_a_short_row_is_filled_up() -> None:
    assert markdown(["a", "b"], [["1"], ["1", "2"]]).splitlines() == ["| a | b |", "|---|---|", "| 1 |  |", "| 1 | 2 |"]


# ---- cells ----------------------------------------------------------------------------------------------------------


def test_figures_are_rounded_in_one_way() -> None:
    assert cells.number(1234.56, 1) == "1,235"
    assert cells.number(12.345, 1) == "12.3"
    assert cells.number(None) == "-"
    assert cells.percent(0.0123) == "1.2 %"
    assert cells.ratio({"median": 1.0161, "interval": [1.0102, 1.0191], "pairs": 24}) == "1.016 [1.010, 1.019]"
    assert cells.ratio({"median": 1.0, "interval": [1.0, 1.0], "pairs": 1}) == "1.000"
    assert cells.ratio(None) == "-"
    assert cells.span([2.0, None, 1.0, 3.0], 1, " x") == "1.0 to 3.0 x"
    assert cells.span([1.0, 1.0]) == "1.00"
    assert cells.span([]) == "-"


# ---- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_made_with_all_results_and_with_none(name: str, committed: dict[str, Result]) -> None:
    for results in (committed, {}):
        made = TABLES[name](results)
        widths = {line.count(" |") for line in made.splitlines() if line.startswith("| ")}
        assert made.endswith("\n")
        assert len(widths) <= 1, "every row has as many cells"


@pytest.mark.parametrize("name", TABLES)
def test_every_table_stands_on_a_page(name: str) -> None:
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    assert sum(match["name"] == name for page in pages for match in BLOCK.finditer(page)) == 1


def test_every_benchmark_has_its_line_in_the_overview() -> None:
    assert BENCHMARKS.keys() <= {line.id for line in LINES}


def test_every_committed_result_is_of_a_command_that_exists(committed: dict[str, Result]) -> None:
    for name, result in committed.items():
        if name != "demo" and not name.startswith(("drill-", "simulate")):
            assert name in BENCHMARKS, name
            assert result.command.startswith(f"vtoken bench {name}")


def test_every_answer_to_a_question_is_a_command() -> None:
    simulated = {"simulate-check", "simulate-study", "simulate-sensitivity"}
    assert {name for question in QUESTIONS for name in question.ids} <= BENCHMARKS.keys() | simulated
    assert [question.id for question in QUESTIONS] == [f"Q{number}" for number in range(1, 14)]
    assert all(question.ids or "no command" in question.open for question in QUESTIONS)


def changed(value: Any) -> Any:
    """The same with other numbers, in other ratios."""
    if isinstance(value, dict):
        return {key: changed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [changed(one) for one in value]
    return value * value + 1 if isinstance(value, int | float) and not isinstance(value, bool) else value


NOT_OF_VALUES = {"questions", "runs"}
"""Tables of what is beside the values."""


@pytest.mark.parametrize("name", sorted(TABLES.keys() - NOT_OF_VALUES))
def test_no_figure_is_typed(name: str, committed: dict[str, Result]) -> None:
    """With other values no row with figures stays as it is."""
    other = {key: replace(result, values=changed(result.values)) for key, result in committed.items()}
    rows, others = (
        [line for line in TABLES[name](results).splitlines() if line.startswith("| ")][1:]
        for results in (committed, other)
    )
    stays = set(rows) & set(others)
    figures = re.compile(r"\d+\.\d+|[1-9]\d+ of \d+")
    assert [row for row in stays if figures.search(row.split("|", 2)[-1]) and "not measured" not in row] == []


def test_the_committed_pages_are_what_the_result_files_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tables", "--check", "--root", str(ROOT)]) == 0, capsys.readouterr().err


def test_a_stale_page_is_named_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for page in PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("<!-- table soak: -->\n<!-- end of table -->\n")
    words = ["bench", "tables", "--root", str(tmp_path)]
    assert main([*words, "--check"]) == 1
    assert "README.md is not what" in capsys.readouterr().err
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    assert "vtoken bench soak --record" in (tmp_path / PAGES[0]).read_text()


# ---- results of shapes that are not committed ------------------------------------------------------------------------


def made_of(name: str, table: str, values: dict[str, Any], **changes: Any) -> str:
    """A table of one result alone."""
    given = {"id": name, "passed": True, "interval": {}, "command": "c", "date": "d", "machine": "m", **changes}
    return TABLES[table]({name: Result(values=values, **given)})


def test_a_soak_is_summed_up_over_its_modes() -> None:
    mode = dict.fromkeys(
        ["steps", "requests", "aborted", "preemptions", "evicted", "moves", "blocks_released", "checks",
         "probes_compared", "worker_checks"], 1500,
    ) | dict.fromkeys(
        ["failures", "probes_wrong", "disagreements", "leaked_blocks", "left_tables", "wrong_lengths"], 0
    )  # fmt: skip
    values = {"eager": mode | {"growth_mib": 1.25}, "lazy": mode | {"growth_mib": 0.0}, "minutes": 30.0}
    assert "| growth of memory, MiB | 1.2 | 0.0 |" in made_of("soak", "soak", values)
    phrase = "30 minutes, 3,000 requests, 3,000 plans of moves compared, 0 faults | holds |"
    assert phrase in made_of("soak", "overview", values)
    wrong = {**values, "lazy": values["lazy"] | {"leaked_blocks": 2}}
    assert "2 faults | **does not hold** |" in made_of("soak", "overview", wrong, passed=False)


def test_drills_show_their_counts_and_what_failed() -> None:
    values = {"kills": 5, "recovery_worst_s": 12.5, "share": [0.9], "failures": ["2 lost"]}
    made = made_of("drill-kill-replica", "drills", values, passed=False)
    row = "| `vtoken drill kill-replica` | **does not hold** | kills 5; recovery worst s 12.5; **2 lost** | d |"
    assert row in made.splitlines()


def test_pressure_is_shown_by_rule() -> None:
    one = {"good_per_s": 1.5, "late": 1, "failed": 0, "preemptions": 3, "ttft_p50_s": None}
    rules = {"room": one, "round_robin": {**one, "preemptions": 9}}
    values = {"under_pressure": rules, "without_pressure": {"room": one}, "gain_over_best": 1.2}
    assert "| memory ample | `room` | 1.500 | 3 | 0 |" in made_of("pressure", "pressure", values)
    assert "1.20 x the best simple rule; 3 preemptions beside 9; - without" in made_of("pressure", "overview", values)


def test_every_line_of_the_overview_has_its_phrase() -> None:
    assert {line.id for line in LINES} == FOUND.keys()


def test_the_readme_is_made_of_what_the_demo_keeps() -> None:
    naive = Measured(["a"], 100.0, peak_blocks=200, blocks_per_request=12.5, waste=0.4, tokens_evicted=1000)
    moved = replace(naive, peak_blocks=90, waste=0.07, tokens_moved=700, blocks_released=60, tokens_per_s=95.0)
    measured = {"naive": asdict(naive), "vtoken-strict": asdict(moved), "vtoken": asdict(moved)}
    kept = outcome({"outputs_identical": 1, "outputs_compared": 1}, measured, ["a bar"])
    assert not kept.passed
    assert "texts" not in kept.values["compared"]["naive"]
    made = made_of("demo", "readme", kept.values)
    for shown in (
        "| 200 | 90 (0.45 x) |",
        "| 0.400 | 0.070 |",
        "| 0 | 700 (of 1,000 evicted) |",
        "1 of 1",
        "| 1 | 0.95; ",
    ):
        assert shown in made


def test_waste_is_shown_by_policy_and_variant() -> None:
    one = {
        "waste": 0.5, "half_empty_share": 0.6, "blocks_per_request": 20.0, "moves_per_freed_block": 0.0,
    }  # fmt: skip
    eager = {**one, "waste": 0.04, "half_empty_share": 0.1, "blocks_per_request": 11.0, "moves_per_freed_block": 9.5}
    values = {"generation": {"random": {"naive": one, "lazy": one, "eager": eager}}, "failures": ["x"]}
    row = "| generation | `random` | 0.500 | 0.500 | 0.040 | 60 % | 10 % | 20.0 | 20.0 | 11.0 | -45.0 % | 0.0 | 9.5 |"
    assert row in made_of("waste", "waste", values).splitlines()
    phrase = "F 0.50 naive, 60 % of blocks at most half full; 0.04 eager; blocks -45.0 %"
    assert phrase in made_of("waste", "overview", values)


def test_a_service_level_is_shown_by_clients() -> None:
    step = {"variant": "eager", "concurrency": 8, "tokens_per_s": 150.0, "p50_s": 9.0, "p95_s": 10.0, "preemptions": 0}
    values = {"level_s": 10.5, "over_naive": {"naive": 1.0, "eager": 1.5}, "sweep": [step, {**step, "p95_s": 11.0}]}
    made = made_of("sla", "sla", values)
    assert "| eager | 8 | 150 | 9.00 | 10.00 | yes | 0 |" in made
    assert "| eager | 8 | 150 | 9.00 | 11.00 | no | 0 |" in made
    assert "over naive: naive 1.00 x, eager 1.50 x, within 10.50 s" in made_of("sla", "overview", values)


def test_prefix_caching_is_shown_by_sharing() -> None:
    naive = {"hit_rate": 0.5, "late_hit_rate": 0.25, "blocks": 200.0, "shared_blocks": 40.0}
    values = {"4": {"naive": naive, "eager": {**naive, "blocks": 150.0, "late_hit_rate": 0.245, "shared_blocks": 30.5}}}
    row = "| 4 | 50.0 % | 50.0 % | 25.0 % | 24.5 % | 200 | 150 | -25.0 % | 40.0 | 30.5 |"
    assert row in made_of("prefix", "prefix", values).splitlines()
    phrase = "hit rates up to 0.50 points apart; blocks -25.0 %; up to 9.5 shared blocks fewer"
    assert phrase in made_of("prefix", "overview", values)
