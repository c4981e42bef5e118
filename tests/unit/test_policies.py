"""The shipped policies against slow references, and the ledger that tells them about attention."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.unit.slow_policies import REFERENCES, Story
from vtoken.core.policies import AttentionScores, KeyScores, Needs, RequestView, load_policy, needs_of
from vtoken.core.policies.paged_eviction import PAGE
from vtoken.core.scores import HISTORY_WINDOWS, AttentionLedger, Observation

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "keep-every-other"
SHIPPED = {p.name: p for p in entry_points(group="vtoken.policies") if p.value.startswith("vtoken.")}
STORIES = 200
each_policy = pytest.mark.parametrize("name", sorted(SHIPPED))


def test_every_shipped_policy_has_a_reference() -> None:
    assert SHIPPED.keys() == REFERENCES.keys()


@each_policy
def test_the_kept_set_is_that_of_the_slow_reference(name: str) -> None:
    policy = load_policy(name)
    for number in range(STORIES):
        story = Story(number)
        for _ in range(int(story.rng.integers(1, 8))):
            for _ in range(int(story.rng.integers(0, 5))):
                story.decode(int(story.rng.integers(1, 20)))
            story.lose_some()
            if not story.candidates():
                continue
            view, plain = story.decision(needs_of(policy))
            chosen = policy.select(view)
            where = f"story {number} at {story.total} tokens"
            assert chosen.dtype == np.int64, where
            assert (np.diff(chosen) > 0).all(), where
            assert set(chosen.tolist()) <= set(plain.candidates), where
            assert len(chosen) == plain.excess or (name == "paged_eviction" and len(chosen) < plain.excess), where
            assert set(plain.candidates) - set(chosen.tolist()) == set(plain.candidates) - set(REFERENCES[name](plain))
            assert type(policy)().select(view).tolist() == policy.select(view).tolist() == chosen.tolist(), where
            story.die(chosen.tolist())


@each_policy
def test_a_single_candidate_goes_or_waits_for_its_page(name: str) -> None:
    story = Story(0)
    story.die(story.candidates()[1:])
    view, plain = story.decision(needs_of(load_policy(name)), excess=1)
    assert load_policy(name).select(view).tolist() == ([] if name == "paged_eviction" else plain.candidates)


def test_no_two_policies_answer_alike() -> None:
    """The stories are rich enough to tell every policy from every other."""

    def answer(name: str, number: int) -> tuple[int, ...]:
        story, policy = Story(number), load_policy(name)
        for tokens in (3, 9, 5):
            story.decode(tokens)
        return tuple(policy.select(story.decision(needs_of(policy))[0]).tolist())

    answers = {name: [answer(name, number) for number in range(STORIES)] for name in SHIPPED}
    for name, given_by in answers.items():
        alike = [other for other in answers if other != name and answers[other] == given_by]
        assert alike == [], name
    # FastGen chooses between two others: both must have been met.
    pairs = list(zip(answers["fastgen"], answers["h2o"], answers["streaming_llm"], strict=True))
    assert any(mine == heavy != local for mine, heavy, local in pairs)
    assert any(mine == local != heavy for mine, heavy, local in pairs)


def test_random_forgets_every_candidate_equally_often() -> None:
    often = np.zeros(10)
    for total in range(2000):
        often[load_policy("random").select(RequestView(total, 10, np.arange(10), 3, (0, 1, total)))] += 1
    assert often.sum() == 6000
    assert np.abs(often - 600).max() < 5 * np.sqrt(2000 * 0.3 * 0.7)


def test_paged_eviction_forgets_whole_pages_only() -> None:
    """Ids 0 to 3 are protected sinks and 37 is dead, so pages 0 and 2 can't go; page 3 is worth least."""
    candidates = np.array([t for t in range(4, 80) if t != 37])
    value_norms = np.select([candidates // PAGE == 3, candidates // PAGE == 1], [1.0, 2.0], 3.0)
    keys = KeyScores(np.ones(75), value_norms, np.zeros(75))

    def forgotten(excess: int) -> list[int]:
        return load_policy("paged_eviction").select(RequestView(90, 89, candidates, excess, (), keys=keys)).tolist()

    assert forgotten(15) == []
    assert forgotten(16) == forgotten(31) == list(range(48, 64))
    assert forgotten(32) == [*range(16, 32), *range(48, 64)]
    assert forgotten(75) == [*range(16, 32), *range(48, 80)]


def of_attention(name: str, *windows: list[float], excess: int, live: int) -> list[int]:
    """What a policy forgets of ids 0, 1, ..., whose mass in windows of one query each is given."""
    mass = np.array(windows)
    ends = np.full(len(mass), live)
    scores = AttentionScores(mass.sum(axis=0), mass[-1], mass, np.ones(len(mass), np.int64), ends, len(mass))
    view = RequestView(live, live, np.arange(mass.shape[1]), excess, (), attention=scores)
    return load_policy(name).select(view).tolist()


def test_scissorhands_keeps_what_is_important_often_and_h2o_what_was_important_once() -> None:
    """Token 0 had one great moment; token 1 is above 1 / 10 in every window."""
    windows = [0.9, 0.2, 0.0], [0.0, 0.2, 0.05], [0.0, 0.2, 0.05]
    assert of_attention("scissorhands", *windows, excess=2, live=10) == [0, 2]
    assert of_attention("h2o", *windows, excess=2, live=10) == [1, 2]
    assert of_attention("tova", *windows, excess=1, live=10) == [0]


def test_scissorhands_does_not_blame_a_token_for_windows_before_it() -> None:
    """Windows of 4 queries up to 4, 8 and 12, none looks at anything: token 9 was seen by three queries alone."""
    mass = np.zeros((3, 3))
    scores = AttentionScores(mass[0], mass[0], mass, np.full(3, 4), np.array([4, 8, 12]), 12)

    def forgotten(excess: int) -> list[int]:
        view = RequestView(12, 12, np.array([1, 5, 9]), excess, (), attention=scores)
        return load_policy("scissorhands").select(view).tolist()

    assert forgotten(1) == [1]
    assert forgotten(2) == [1, 5]
    mass[2, 2] = 0.3  # of three queries, an even share of one is 1 / 12
    assert forgotten(1) == [1]
    mass[:, 0], mass[1:, 1], mass[2, 2] = 0.4, 0.4, 0.2
    assert forgotten(1) == [9]


def test_snapkv_keeps_the_neighbours_of_what_was_looked_at() -> None:
    mass = [0.2, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.6, 0.0, 0.0, 0.0, 0.1]
    assert of_attention("snapkv", mass, excess=5, live=12) == [0, 1, 2, 3, 11]
    assert of_attention("snapkv", mass, excess=11, live=12) == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


def test_fastgen_is_local_where_recent_tokens_have_the_mass() -> None:
    assert of_attention("fastgen", [0.04, 0.0, 0.5, 0.46], excess=2, live=4) == [0, 1]
    assert of_attention("fastgen", [0.02, 0.0, 0.5, 0.01], excess=2, live=4) == [0, 1]
    assert of_attention("fastgen", [0.3, 0.0, 0.5, 0.2], excess=2, live=4) == [1, 3]


@each_policy
def test_a_policy_declares_what_it_looks_at(name: str) -> None:
    tree = ast.parse(inspect.getsource(import_module(SHIPPED[name].module)))
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "view"
    }
    looks_at = [needs for needs in (Needs.ATTENTION, Needs.KEYS) if needs.value in read] or [Needs.NOTHING]
    assert looks_at == [needs_of(load_policy(name))]


@each_policy
def test_a_policy_is_one_class_of_one_method_in_a_file_of_50_lines(name: str) -> None:
    source = inspect.getsource(import_module(SHIPPED[name].module))
    assert len(source.splitlines()) <= 50
    (policy,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    assert [node.name for node in policy.body if isinstance(node, ast.FunctionDef)] == ["select"]


# ---- The ledger -----------------------------------------------------------------------------------------------------


class Twin:
    """AttentionLedger with dictionaries."""

    def __init__(self) -> None:
        self.total: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.windows: list[tuple[int, int, dict[int, float]]] = []

    def observe(self, mass: dict[int, float], last: dict[int, float], queries: int, end: int) -> None:
        for token, number in mass.items():
            self.total[token] = self.total.get(token, 0.0) + number
        self.last = last
        self.windows.append((queries, end, mass))


STEPS = st.lists(st.tuples(st.sampled_from(["grow", "die", "observe", "observe"]), st.integers(1, 12)), max_size=40)


@given(STEPS, st.randoms(use_true_random=False))
def test_the_ledger_is_its_dictionary_twin(steps: list[tuple[str, int]], random: Random) -> None:
    ledger, twin, live, total = AttentionLedger(), Twin(), [0], 1
    for what, number in steps:
        if what == "grow":
            live, total = [*live, *range(total, total + number)], total + number
        elif what == "die":
            live = sorted(random.sample(live, max(0, len(live) - number)))
        else:
            mass, last = ({token: random.random() for token in live} for _ in range(2))
            ids = np.array(live, np.int64)
            ledger.observe(Observation(ids, np.array([*mass.values()]), np.array([*last.values()]), number, total))
            twin.observe(mass, last, number, total)
        asked = sorted(random.sample(range(total), random.randint(0, total)))
        found, windows = ledger.of(np.array(asked, np.int64)), twin.windows[-HISTORY_WINDOWS:]
        assert found.total.tolist() == [twin.total.get(token, 0.0) for token in asked]
        assert found.last.tolist() == [twin.last.get(token, 0.0) for token in asked]
        assert found.windows.shape == (len(windows), len(asked))
        assert found.windows.tolist() == [[mass.get(token, 0.0) for token in asked] for *_, mass in windows]
        assert found.window_queries.tolist() == [queries for queries, *_ in windows]
        assert found.window_ends.tolist() == [end for _, end, _ in windows]
        assert found.queries == ledger.queries == sum(queries for queries, *_ in twin.windows)


# ---- The page and the example ---------------------------------------------------------------------------------------


def test_the_page_and_the_readme_list_what_is_shipped() -> None:
    shipped = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8").split("## Shipped")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|(?:.*\|)? (\w+) \|$", shipped, re.MULTILINE))
    needs = {name: needs_of(load_policy(name)).value for name in SHIPPED}
    assert rows == {**needs, "none": "nothing"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Policies")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|[^|]+\|$", readme, re.MULTILINE)) == sorted(["policy", *SHIPPED])


@pytest.mark.parametrize("file", ["pyproject.toml", "keep_every_other.py", "test_keep_every_other.py"])
def test_the_page_shows_the_example_as_it_is(file: str) -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    (shown,) = re.findall(rf"^```\w+\n# {re.escape(file)}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert shown == (EXAMPLE / file).read_text(encoding="utf-8")


def test_the_example_installs_loads_by_its_name_and_passes_its_test(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(EXAMPLE, source)  # a build leaves files beside the source
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", *install, str(source)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    script = "from vtoken.core.policies import load_policy; print(type(load_policy('every_other')).__name__)"
    named = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert named.stdout == "EveryOther\n"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(source)]
    subprocess.run(tests, env=environment, cwd=source, check=True)
