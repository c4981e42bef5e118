"""An interrupted run goes on where it was, with the very pieces that it had, and with none of another run's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vtoken.bench import command, frontier, idle, scoring, sla, speed, waste
from vtoken.bench.command import Benchmark
from vtoken.bench.frontier import QUICK, Trial, judge
from vtoken.bench.scoring import Round
from vtoken.bench.sla import Loop
from vtoken.bench.stepper import Cost
from vtoken.bench.twins import Pair
from vtoken.bench.waste import Watched
from vtoken.cli import main
from vtoken.results.journal import Journal
from vtoken.results.outcome import Outcome

HEADER = {"name": "x", "versions": {"torch": "1"}}
COST = Cost(1, 2, 3.0, 4.0, 5.0, busy=True)
CONSOLE = Console(quiet=True)


def same(value: Any) -> Any:
    return value


def journal(path: Path | None, header: Mapping[str, Any] = HEADER) -> Journal:
    return Journal(path, header, CONSOLE)


def never() -> Any:
    pytest.fail("done before")


def test_a_piece_is_done_once_and_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "out" / "x.partial.jsonl"
    with journal(path) as first:
        first.begin(2)
        assert first.of("a", lambda: {8: (1, 2)}, same, same) == {"8": [1, 2]}
        with pytest.raises(RuntimeError):
            first.of("b", lambda: (_ for _ in ()).throw(RuntimeError("stopped")), same, same)
    with journal(path) as second:
        assert "a" in second
        assert "b" not in second
        assert second.of("a", never, same, same) == {"8": [1, 2]}
        assert second.of("b", lambda: 3, same, same) == 3
    second.forget()
    assert not path.exists()


@pytest.mark.parametrize("header", [{**HEADER, "name": "y"}, {**HEADER, "versions": {"torch": "2"}}, {}])
def test_pieces_of_another_command_or_version_are_dropped(tmp_path: Path, header: dict[str, Any]) -> None:
    path = tmp_path / "x.partial.jsonl"
    journal(path).of("a", lambda: 1, same, same)
    other = journal(path, header)
    assert "a" not in other
    assert other.of("a", lambda: 2, same, same) == 2
    assert journal(path, header).of("a", never, same, same) == 2


def test_a_line_that_was_cut_off_costs_its_own_piece_only(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    for key in "ab":
        journal(path).of(key, lambda: 1, same, same)
    path.write_text(path.read_text()[:-9])
    again = journal(path)
    assert ("a" in again, "b" in again) == (True, False)
    again.of("b", lambda: 2, same, same)
    again.of("c", lambda: 3, same, same)
    assert [journal(path).of(key, never, same, same) for key in "abc"] == [1, 2, 3]


def test_without_a_place_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    unkept = journal(None)
    assert unkept.of("a", lambda: 1, same, same) == 1
    unkept.forget()
    assert list(tmp_path.iterdir()) == []


# ---- pieces of the benchmarks ---------------------------------------------------------------------------------------

ROUND = Round(COST, [COST, replace(COST, busy=False)], 0.5, [(1, 2), (3,)])


@pytest.mark.parametrize(
    ("encode", "decode", "piece"),
    [
        (idle._encoded, idle._decoded, {1: [Pair(COST, COST, identical=True)], 8: []}),
        (scoring._encoded, scoring._decoded, (ROUND, ROUND)),
        (speed._encoded, speed._decoded, {"native": [COST], "random": [COST, COST]}),
        (waste._encoded, waste._decoded, ({"waste": 0.5}, Watched([0.1], [0.2], [3.0], [1.0], []))),
    ],
)
def test_a_piece_of_a_benchmark_survives(
    encode: Callable[[Any], Any], decode: Callable[[Any], Any], piece: Any
) -> None:
    assert decode(json.loads(json.dumps(encode(piece)))) == piece


def trial(concurrency: int, preemptions: int = 0) -> Trial:
    return Trial(concurrency, preemptions, 100.0 + concurrency, 30, 10, 90, 0.01, 1.0)


def test_a_frontier_goes_on_behind_the_searches_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def search(_model: str, scene: Any, variant: str, candidates: Any, _console: Console) -> list[Trial]:
        searched.append(variant)
        if len(searched) == 3:
            raise KeyboardInterrupt
        return [trial(next(iter(candidates))), trial(99, preemptions=1)]

    monkeypatch.setattr(frontier, "_search", search)
    path = tmp_path / "frontier.partial.jsonl"
    with pytest.raises(KeyboardInterrupt), journal(path) as interrupted:
        frontier.run("m", CONSOLE, interrupted, quick=True)
    with journal(path) as resumed:
        outcome = frontier.run("m", CONSOLE, resumed, quick=True)
    assert searched == ["eager", "native", "naive", "naive", "lazy", "eager", "native"]
    assert [row["variant"] for row in outcome.samples] == [v for v in [*searched[:2], *searched[3:]] for _ in range(2)]


def test_a_kept_sweep_starts_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = journal(tmp_path / "x.jsonl")
    for variant in sla.VARIANTS:
        for clients in sla.QUICK.clients:
            kept.of(f"round 1, {variant}, {clients} clients", lambda: Loop([1.0, 2.0], 3.0), asdict, same)
    monkeypatch.setattr(sla, "engine", never)
    outcome = sla.run("m", CONSOLE, kept, quick=True)
    assert len(outcome.samples) == 2 * len(sla.VARIANTS) * len(sla.QUICK.clients)


# ---- the frontier's bars --------------------------------------------------------------------------------------------


def test_the_frontiers_bars() -> None:
    scene = QUICK[0]
    good = {"eager": [trial(scene.target)], "native": [trial(scene.target, 5)]}
    assert judge(scene, good)[1]
    assert not judge(scene, {**good, "eager": [trial(scene.target, 1)]})[1]
    assert not judge(scene, {**good, "eager": [replace(trial(scene.target), moves=200)]})[1]
    assert not judge(scene, {**good, "eager": [replace(trial(scene.target), excess_waste=0.06)]})[1]
    assert not judge(scene, {**good, "eager": [replace(trial(scene.target), excess_blocks=1.5)]})[1]
    five, lazy = scene.unevicted, {"lazy": [trial(8)]}
    assert judge(scene, {**good, "naive": [trial(five)], **lazy})[1]
    assert not judge(scene, {**good, "naive": [trial(five + 1)], **lazy})[1]
    assert not judge(scene, {**good, "naive": [trial(five)], "lazy": [trial(7)]})[1]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_keeps_pieces_until_the_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def measure(_arguments: object, _console: object, journal: Journal) -> Outcome:
        journal.begin(2)
        for key in "ab":
            journal.of(key, lambda key=key: done.append(key), same, same)  # type: ignore[misc]
            if done == ["a"]:
                raise KeyboardInterrupt
        return Outcome("copy")

    monkeypatch.setattr(command, "stop_on_signals", lambda: None)
    monkeypatch.setitem(command.BENCHMARKS, "copy", Benchmark("in two pieces", measure))
    words = ["bench", "copy", "--out", str(tmp_path), "--model", "somewhere/model"]
    assert main(words) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["copy.partial.jsonl"]
    done.append("interrupted")
    assert main(words) == 0
    assert done == ["a", "interrupted", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["copy.json"]
