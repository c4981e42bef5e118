"""Last lines and result files: one shape, nothing lost on the way to a file and back, nobody's paths in it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import pytest

from vtoken.bench import record
from vtoken.cli import main
from vtoken.core.errors import ConfigError
from vtoken.results import files, last_line, machine
from vtoken.results.files import Result, Source
from vtoken.results.outcome import Outcome, intervals, jsonable
from vtoken.results.ratio import ratio

RATIO = {"median": 1.0, "interval": [0.9, 1.1], "pairs": 5}
SHAPE = {"id", "pass", "values", "interval", "command"}


def result(**changes: object) -> Result:
    given = {
        "id": "idle", "passed": True, "values": {"8": {"cpu": RATIO}}, "interval": {"8.cpu": [0.9, 1.1]},
        "command": "vtoken bench idle", "date": "2026-11-30", "machine": "2 cores", "versions": {"vtoken": "0.1.0"},
    }  # fmt: skip
    return Result(**{**given, **changes})


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    last_line.add_arguments(parser)
    return parser.parse_args(words)


# ---- outcome --------------------------------------------------------------------------------------------------------


def test_an_outcome_passes_only_if_every_bar_holds() -> None:
    outcome = Outcome("x", values={"n": 1})
    outcome.expect(holds=True, otherwise="no")
    assert outcome.line("c") == {"id": "x", "pass": True, "values": {"n": 1}, "interval": {}, "command": "c"}
    outcome.expect(holds=False, otherwise="too late")
    assert outcome.line("c")["pass"] is False
    assert outcome.line("c")["values"] == {"n": 1, "failures": ["too late"]}
    assert not Outcome("x", holds=False).passed


def test_every_interval_is_found_by_the_path_of_its_value() -> None:
    values = {"all": RATIO, "8": {"cpu": RATIO, "share": 0.1}, "one": {"median": 1.0, "interval": None}}
    assert dict(intervals(values)) == {"all": [0.9, 1.1], "8.cpu": [0.9, 1.1]}


def test_a_ratio_of_the_benchmarks_is_found_as_an_interval() -> None:
    values = {"cpu": ratio([1.0, 2.0], [1.0, 1.0]).to_mapping()}
    assert list(dict(intervals(values))) == ["cpu"]


def test_what_json_does_not_have_is_null_and_keys_are_text() -> None:
    assert jsonable({8: (math.nan, math.inf, 1.5), "a": {True: None}}) == {"8": [None, None, 1.5], "a": {"True": None}}


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_result_file_says_what_was_written(tmp_path: Path) -> None:
    written = result(passed=None, source=Source.TRANSCRIBED, note="beside other work")
    files.write(tmp_path, written)
    assert files.read(tmp_path) == {"idle": written}


def test_a_new_run_replaces_the_samples_of_the_old_one(tmp_path: Path) -> None:
    files.write(tmp_path, result(), [{"a": 1, "b": 0.123456789}, {"a": 2, "c": "x"}])
    assert files.read_csv(tmp_path / "idle.csv") == [
        {"a": "1", "b": "0.123457", "c": ""}, {"a": "2", "b": "", "c": "x"},
    ]  # fmt: skip
    files.write(tmp_path, result())
    assert files.read_csv(tmp_path / "idle.csv") == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"pass": true}', result().to_text().replace('"run"', '"rumour"'),
             result().to_text().replace('"date"', '"day"')],
)  # fmt: skip
def test_what_is_no_result_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "idle.json").write_text(text)
    with pytest.raises(ConfigError, match=r"idle\.json"):
        files.read(tmp_path)


def test_a_file_bears_its_results_name(tmp_path: Path) -> None:
    (tmp_path / "soak.json").write_text(result().to_text())
    with pytest.raises(ConfigError, match="Rename"):
        files.read(tmp_path)


@pytest.mark.parametrize("name", ["../x", "a/b", "", "A b"])
def test_an_id_that_makes_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        files.write(tmp_path, result(id=name))


def test_a_shorter_run_is_known_by_its_command() -> None:
    assert result(command="vtoken bench idle --quick").quick
    assert not result().quick


# ---- the end of a command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passed", [True, False])
def test_a_command_prints_one_shape_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["python", "bench", "idle", "--out", str(tmp_path)])
    outcome = Outcome("idle", passed, {8: {"cpu": RATIO}}, samples=[{"a": 1}])
    assert last_line.finish(outcome, arguments("--out", str(tmp_path))) == (not passed)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(line) == SHAPE
    assert line["command"] == "vtoken bench idle"
    found = files.read(tmp_path)["idle"]
    assert (found.passed, found.values, found.interval) == (line["pass"], line["values"], line["interval"])
    assert found.source is Source.RUN
    assert found.versions["vtoken"]
    assert str(tmp_path) not in found.to_text()
    assert files.read_csv(tmp_path / "idle.csv") == [{"a": "1"}]


def test_a_shorter_run_does_not_replace_the_one_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()

    def record(*words: str, passed: bool = True) -> None:
        monkeypatch.setattr(sys, "argv", ["python", "bench", "idle", "--record", *words])
        last_line.finish(Outcome("idle", passed), arguments("--record"))

    record("--quick")
    record(passed=False)
    with pytest.raises(ConfigError, match=r"--out DIR"):
        record("--quick")
    assert files.read(files.RESULTS)["idle"].passed is False
    record()
    assert files.read(files.RESULTS)["idle"].passed is True


def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert last_line.finish(Outcome("idle"), arguments()) == 0
    assert list(tmp_path.iterdir()) == []


def test_record_is_refused_beside_out_and_outside_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="checkout"):
        last_line.directory(arguments("--record"))
    with pytest.raises(ConfigError, match="one of the two"):
        last_line.directory(arguments("--record", "--out", "x"))
    (tmp_path / "docs").mkdir()
    assert last_line.directory(arguments("--record")) == files.RESULTS


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["vtoken", "bench", "idle", "--quick"], "vtoken bench idle --quick"),
        (["vtoken", "--data", "/somebody/books", "--out=/tmp/x"], "vtoken --data DIR"),
        (["vtoken", "~/books", "../x", "./x", "a/b"], "vtoken DIR DIR DIR a/b"),
        (["vtoken", "bench", "x", "--note", "beside other work", "--record", "--quick"], "vtoken bench x --quick"),
        (["vtoken", "--address", "http://10.0.0.1:8000"], "vtoken --address URL"),
        (["vtoken", "--case", "azure, pressure", "--rate", "0.5"], "vtoken --case 'azure, pressure' --rate 0.5"),
    ],
)
def test_a_command_names_nobodys_paths_and_addresses(words: list[str], shown: str) -> None:
    assert machine.portable(words) == shown


def test_a_machine_is_named_by_its_kind() -> None:
    named = machine.machine()
    assert "core" in named
    assert "GiB" in named
    assert "/" not in named


# ---- saved lines ----------------------------------------------------------------------------------------------------


def test_a_saved_last_line_becomes_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    old = {"id": "idle", "pass": False, "values": {"8": {"cpu": RATIO}}, "command": "vtoken bench idle --model /a/b"}
    log.write_text(f'{{"id": "first"}}\nprogress\n{json.dumps(old)}\n{{\'a\': 1}}\n\nreal 1m2s\n')
    words = ["bench", "record", str(log), "--out", str(tmp_path / "out"), "--date", "2026-11-29", "--machine", "a GPU"]
    assert main([*words, "--note", "at night"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "idle.json")
    found = files.read(tmp_path / "out")["idle"]
    assert (found.passed, found.date, found.machine, found.note) == (False, "2026-11-29", "a GPU", "at night")
    assert found.interval == {"8.cpu": [0.9, 1.1]}
    assert found.command == "vtoken bench idle --model DIR"
    assert found.source is Source.LINE
    assert "commit" not in found.versions


def test_a_drill_of_before_keeps_its_name_and_samples_come_along(tmp_path: Path) -> None:
    log, samples = tmp_path / "drill.log", tmp_path / "samples.csv"
    log.write_text('{"drill": "lag", "pass": true, "values": {"mean_share": 0.9}}\n')
    samples.write_text("a,b\n1,2\n")
    assert main(["bench", "record", str(log), "--samples", str(samples), "--out", str(tmp_path)]) == 0
    found = files.read(tmp_path)["drill-lag"]
    assert (found.passed, found.values, found.command) == (True, {"mean_share": 0.9}, "vtoken drill lag")
    assert files.read_csv(tmp_path / "drill-lag.csv") == [{"a": "1", "b": "2"}]
    for words in ([str(log), str(log), "--samples", str(samples)], [str(log), "--samples", "none.csv"]):
        assert main(["bench", "record", *words, "--out", str(tmp_path)]) == 2


@pytest.mark.parametrize("text", ["", "no line\n", '{"id": "x", "pass": true}\n', "{broken\n", "[1]\n"])
def test_a_file_without_a_last_line_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.log").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.log"):
        record.last_line(tmp_path / "run.log")


def test_a_date_that_is_none_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(json.dumps(Outcome("x").line("c")))
    assert main(["bench", "record", str(log), "--out", str(tmp_path), "--date", "yesterday"]) == 2
