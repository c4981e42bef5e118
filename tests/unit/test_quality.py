"""What `vtoken bench quality` cuts, counts and concludes; no engine."""

from __future__ import annotations

import json
import math
import re
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from rich.console import Console

from vtoken.bench import quality, quality_measurement, quality_report
from vtoken.bench.quality import ordering_as_published, outcome, unmonotone
from vtoken.bench.quality_engine import FULL_CACHE, Case
from vtoken.bench.quality_measurement import MIDDLE, Measurement, Results
from vtoken.bench.quality_reasons import LOOKING, Changed, Experiments
from vtoken.bench.quality_scores import Likeness, Perplexity, falls, longest_common, perplexity, rouge_l
from vtoken.bench.quality_texts import CHUNK_TOKENS, QUESTION, Needle, Texts
from vtoken.core.config import PolicyOptions
from vtoken.core.errors import ConfigError
from vtoken.results.journal import Journal

BOOK = " ".join(f"Word{number} was here. " for number in range(9000))


class Characters:
    """A tokenizer by characters."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict], tokenize: bool, add_generation_prompt: bool) -> str:
        return f"<user> {messages[0]['content']} <assistant>"


TEXTS = Texts(Characters(), BOOK)


# ---- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directory", [None, "empty"])
def test_without_books_nothing_is_measured(tmp_path: Path, directory: str | None) -> None:
    with pytest.raises(ConfigError, match=r"--data = .*text files.*VTOKEN_DATA"):
        Texts.of_directory("no-model-is-read", directory and str(tmp_path))


def test_passages_have_the_length_asked_for_and_do_not_overlap() -> None:
    passages = [Characters().decode(ids) for ids in TEXTS.passages(4, 1000)]
    assert [len(passage) for passage in passages] == [1000] * 4
    places = [BOOK.index(passage) for passage in passages]
    assert all(later - earlier >= 1000 for earlier, later in pairwise(places))


def test_a_book_too_short_for_them_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 800,000 characters"):
        TEXTS.passages(100, 1000)


def test_needles_stand_at_all_depths_and_the_question_begins_a_chunk() -> None:
    needles = TEXTS.needles(10, 320, 960)
    for needle in needles:
        text = Characters().decode(needle.prompt)
        assert text.endswith(QUESTION)
        assert (len(text) - len(QUESTION)) % CHUNK_TOKENS == 0
        assert text.count(needle.number) == 1
        before, _, _ = text.partition(f" The magic number of Zanzibar is {needle.number}.")
        assert before.endswith(".")
        assert len(before) == round(needle.depth * (len(text) - len(QUESTION)))
    depths = sorted(needle.depth for needle in needles)
    assert depths[0] < 0.2
    assert depths[-1] > 0.7
    assert len({needle.number for needle in needles}) == 10
    assert needles == TEXTS.needles(10, 320, 960)


@pytest.mark.parametrize(
    ("answer", "found"), [(" 12345.", True), ("12,345", True), ("1 2 3 4 5", True), ("1234", False), ("54321", False)]
)
def test_a_needle_is_found_by_its_digits(answer: str, found: bool) -> None:
    needle = Needle([], "12345", 0.5)
    assert needle.found_in(answer) is found


# ---- cases ----------------------------------------------------------------------------------------------------------


def test_cases_are_valid_options() -> None:
    """What an engine would turn down it would ignore, and evict nothing."""
    case = Case("random", 0.3)
    prefill, decode = (PolicyOptions().override(options) for options in (case.prefill(), case.decode()))
    assert (prefill.between_chunks, decode.between_chunks) == (True, False)
    assert prefill.keep_ratio == decode.keep_ratio == 0.3
    assert not PolicyOptions().override(FULL_CACHE.prefill()).evicts


def test_a_changed_case_differs_in_its_own_options_alone() -> None:
    plain, changed = Case("h2o", 0.5), Changed("h2o", 0.5, (("between_chunks", False), ("protect_recent", 99)))
    assert changed.prefill() == {**plain.prefill(), "between_chunks": False, "protect_recent": 99}
    assert PolicyOptions().override(changed.prefill()).evicts
    assert changed != plain


class FakeEngine:
    """Answers by the case alone."""

    live = (10, 30)

    def recall(self, needles: list[Needle], case: Case) -> list[bool]:
        return [index < len(case.policy) for index in range(len(needles))]

    def surprises(self, texts: list[list[int]], case: Case) -> list[np.ndarray]:
        recent = PolicyOptions().override(case.prefill()).protect_recent
        return [np.full(10, math.log(recent)) for _ in texts]

    def read(self, text: list[int], case: Case, tokens: int) -> None:
        pass


def test_experiments_say_what_they_found_by_policy() -> None:
    experiments = Experiments([[0] * 100] * 2, TEXTS.needles(12, 320, 960), 0.5, Console(quiet=True))
    engine = FakeEngine()
    experiments.asked(engine, ["tova", "random"])
    experiments.layers(engine)
    experiments.recent(engine)
    experiments.position(engine, ["h2o"])
    found = experiments.found
    assert found.asked == {"tova": 4, "random": 6}
    assert (found.layers_perplexity["h2o"], found.layers_needles["h2o"]) == (32, 3)
    assert found.recent == dict.fromkeys((*LOOKING, "streaming_llm", "random"), 25)
    assert found.position == {"h2o": 0.2}


# ---- scores ---------------------------------------------------------------------------------------------------------


def test_perplexity_of_a_uniform_choice_is_the_number_of_choices() -> None:
    full = [np.full(640, math.log(8))]
    found = perplexity([np.full(640, math.log(10))], full, 0.5)
    assert found.value == pytest.approx(10)
    assert found.excess == pytest.approx(math.log(10 / 8))
    assert found.error == pytest.approx(0)
    assert perplexity(full, full) == Perplexity(pytest.approx(8), 1.0, 0.0, 0.0)


def test_the_error_of_the_excess_is_that_of_independent_chunks() -> None:
    """1,000 chunks whose differences are drawn with deviation 0.2: the mean is known to 0.2 / sqrt(1000)."""
    difference = np.repeat(np.random.default_rng(0).normal(0.1, 0.2, 1000), CHUNK_TOKENS)
    found = perplexity([difference + 3], [np.full(len(difference), 3.0)])
    assert found.error == pytest.approx(0.2 / 1000**0.5, rel=0.1)
    assert abs(found.excess - 0.1) < 4 * found.error


@pytest.mark.parametrize(
    ("by_ratio", "fall"),
    [({1.0: 10, 0.5: 11, 0.3: 12}, 0), ({1.0: 10, 0.5: 9}, 0.1), ({1.0: 10, 0.5: 20, 0.3: 15}, 0.25), ({1.0: 7}, 0)],
)
def test_falls_are_measured_from_the_highest_so_far(by_ratio: dict[float, float], fall: float) -> None:
    assert falls(by_ratio) == pytest.approx(fall)


def slow_longest_common(first: str, second: str) -> int:
    """By trying all subsequences, longest first."""

    def within(words: tuple[str, ...]) -> bool:
        rest = iter(second)
        return all(word in rest for word in words)

    return next(n for n in range(len(first), -1, -1) if any(within(words) for words in combinations(first, n)))


def test_the_longest_common_subsequence_against_a_slow_twin() -> None:
    random = Random(0)
    for _ in range(200):
        first, second = ("".join(random.choices("abc", k=random.randrange(9))) for _ in range(2))
        assert longest_common(first, second) == slow_longest_common(first, second)


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [("a b c", "a b c", 1.0), ("a c", "a b c d", 2 / 3), ("x", "a b", 0.0), ("", "", 1.0), ("", "a", 0.0)],
)
def test_rouge_l(text: str, reference: str, score: float) -> None:
    assert rouge_l(text, reference) == pytest.approx(score)


# ---- conclusions ----------------------------------------------------------------------------------------------------


def results(random: int = 1, streaming: int = 5, low: float = 12.0) -> Results:
    """Of two policies: needles found of ten, and the perplexity of random at the lowest ratio."""
    found = {FULL_CACHE: Perplexity(10.0), Case("random", 0.7): Perplexity(11.0), Case("random", 0.3): Perplexity(low)}
    recall = {FULL_CACHE: [True] * 10}
    for name, hits in (("random", random), ("streaming_llm", streaming)):
        recall[Case(name, MIDDLE)] = [index < hits for index in range(10)]
    return Results({512: found}, recall, {Case("random", MIDDLE): Likeness(0.4, 0.5)}, {"policies": 1})


def test_the_ordering_is_reported_and_not_required() -> None:
    assert ordering_as_published(results().recall)
    assert not ordering_as_published(results(random=5).recall)
    found = outcome(results(random=6))
    assert found.passed
    assert found.values["ordering_as_published"] is False


@pytest.mark.parametrize(("low", "passes"), [(12.0, True), (10.9, True), (10.7, False)])
def test_keeping_less_must_not_help(low: float, passes: bool) -> None:
    found = outcome(results(low=low))
    assert found.passed is passes
    assert bool(found.values["unmonotone"]) is not passes
    assert (unmonotone(results(low=low).perplexity[512]) == {}) is passes


def probe(shift: float = 0.0, *, tokens: tuple[int, ...] = (1, 2), evicted: int = 9, moves: int = 5) -> dict:
    """What one placement read of one text."""
    return {"read": {"random": (np.full(10, 3.0 + shift), tokens)}, "evicted": evicted, "moves": moves}


@pytest.mark.parametrize(
    ("naive", "strict", "auto", "fault"),
    [
        (probe(moves=0), probe(), probe(1e-5), None),
        (probe(moves=0), probe(1e-7), probe(), "differ under the strict reader"),
        (probe(moves=0), probe(tokens=(1, 3)), probe(), "differ under the strict reader"),
        (probe(moves=0), probe(), probe(1e-2), r"\+1.01% beside"),
        (probe(moves=0), probe(evicted=8), probe(), "nothing was compared"),
        (probe(moves=0, evicted=0), probe(evicted=0), probe(), "nothing was compared"),
        (probe(moves=0), probe(moves=0), probe(), "nothing was compared"),
        (probe(moves=3), probe(), probe(), "nothing was compared"),
    ],
)
def test_placements_must_agree_exactly_and_differ_in_moves(
    naive: dict, strict: dict, auto: dict, fault: str | None
) -> None:
    measured = measurement()
    measured.compare(naive, strict, auto)
    if fault is None:
        assert measured.results.faults == []
        assert measured.results.identity["log_probs"] == 10
    else:
        assert [bool(re.search(fault, found)) for found in measured.results.faults] == [True]


class Answers(FakeEngine):
    """An engine that can be asked for everything; counts how often it is."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.kept = 1.0

    def recall(self, needles: list[Needle], case: Case) -> list[bool]:
        self.asked.append(f"recall {case}")
        return super().recall(needles, case)

    def surprises(self, texts: list[list[int]], case: Case) -> list[np.ndarray]:
        self.asked.append(f"surprises {case}")
        self.kept = case.ratio
        return [np.full(200, 3.0 - case.ratio) for _ in texts]

    def chat(self, prompts: list[list[int]], case: Case, tokens: int) -> list[str]:
        self.asked.append(f"chat {case}")
        self.kept = case.ratio
        return ["a b c" if case == FULL_CACHE else "a b"] * len(prompts)


def measurement(path: Path | None = None) -> Measurement:
    console = Console(quiet=True)
    return Measurement(TEXTS, quality.QUICK, console, Journal(path, {}, console))


def everything(measured: Measurement, engine: Answers) -> Results:
    for measure in (measured.perplexities, measured.recalls, measured.rouges):
        measure(lambda: engine)  # type: ignore[arg-type, return-value]
    return measured.results


def test_an_interrupted_measurement_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    whole, first, second = Answers(), Answers(), Answers()
    expected = everything(measurement(), whole)
    path = tmp_path / "quality.partial.jsonl"
    measurement(path).perplexities(lambda: first)  # type: ignore[arg-type, return-value]
    assert everything(measurement(path), second) == expected
    assert not [question for question in second.asked if question.startswith("surprises")]
    assert sorted(first.asked + second.asked) == sorted(whole.asked)
    third = Answers()
    assert everything(measurement(path), third) == expected
    assert third.asked == []


def test_what_was_kept_is_that_of_the_case_also_where_the_full_cache_is_asked_once_more(tmp_path: Path) -> None:
    path, engine = tmp_path / "quality.partial.jsonl", Answers()
    measured = measurement(path)
    measured.perplexities(lambda: engine)  # type: ignore[arg-type, return-value]
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2]) + "\n")
    again = measurement(path)
    again.perplexities(lambda: engine)  # type: ignore[arg-type, return-value]
    assert again.results.perplexity == measured.results.perplexity
    found = again.results.perplexity[quality.QUICK.text_tokens]
    assert {case.ratio: one.kept for case, one in found.items()} == {1.0: 1.0, 0.7: 0.7, 0.3: 0.3}


def test_there_are_as_many_pieces_as_are_done(tmp_path: Path) -> None:
    path = tmp_path / "quality.partial.jsonl"
    measured = measurement(path)
    everything(measured, Answers())
    probes = 3
    assert len(path.read_text().splitlines()) - 1 == measured.pieces - probes


def test_probes_survive_exactly() -> None:
    kept = quality_measurement._decoded(json.loads(json.dumps(quality_measurement._encoded(probe(1e-13)))))
    assert np.array_equal(kept["read"]["random"][0], probe(1e-13)["read"]["random"][0])
    assert kept["read"]["random"][1] == (1, 2)
    assert (kept["evicted"], kept["moves"]) == (9, 5)


def test_reasons_survive(tmp_path: Path) -> None:
    path = tmp_path / "quality.partial.jsonl"
    first, again = measurement(path), measurement(path)
    first.reasons_by_layers(FakeEngine)  # type: ignore[arg-type]
    restored = measurement(path)
    restored.reasons_by_layers(lambda: pytest.fail("done before"))
    assert restored.results.reasons == first.results.reasons
    assert restored.results.reasons.layers_needles["h2o"] == 3
    assert again.results.reasons != first.results.reasons


# ---- report ---------------------------------------------------------------------------------------------------------


def test_the_samples_have_every_measured_value() -> None:
    rows = outcome(results()).samples
    assert [(row["measure"], row["policy"], row["keep_ratio"], row["value"]) for row in rows] == [
        ("perplexity", "none", 1.0, 10.0), ("perplexity", "random", 0.7, 11.0),
        ("perplexity", "random", 0.3, 12.0), ("needle_recall", "none", 1.0, 1.0),
        ("needle_recall", "random", 0.5, 0.1), ("needle_recall", "streaming_llm", 0.5, 0.5),
        ("rouge_l", "random", 0.5, 0.4),
    ]  # fmt: skip


def test_the_tables_show_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    found = results()
    for table in quality_report.tables(found.perplexity, found.recall, found.likeness):
        Console(width=120).print(table)
    shown = capsys.readouterr().out
    for cell in ("10.00", "11.00", "12.00", "10 of 10", "1 of 10", "5 of 10", "0.400 (0.50)", "all kept", "0.3 kept"):
        assert cell in shown
