"""When a benchmark's bar holds, and what its summaries are made of."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch

from vtoken.bench import idle, rows, speed
from vtoken.bench.native import Case
from vtoken.bench.stepper import Cost, prompts
from vtoken.bench.twins import Pair
from vtoken.results.ratio import Ratio


def cost(cpu_s: float, *, tokens: int = 100, substrate_s: float = 0.0) -> Cost:
    return Cost(steps=tokens, tokens=tokens, wall_s=2 * cpu_s, cpu_s=cpu_s, substrate_s=substrate_s)


def test_costs_add_up_and_the_later_one_says_what_is_left() -> None:
    first, last = Cost(1, 2, 3.0, 4.0, 5.0, busy=True), Cost(10, 20, 30.0, 40.0, 50.0, busy=False)
    assert first + last == Cost(11, 22, 33.0, 44.0, 55.0, busy=False)


def test_prompts_have_the_length_asked_for_and_differ_from_their_first_token_on() -> None:
    made = prompts(8, 50)
    assert [len(prompt) for prompt in made] == [50] * 8
    assert len({prompt[0] for prompt in made}) == 8


# ---- idle -----------------------------------------------------------------------------------------------------------


def test_idle_reports_share_of_wall_time_and_ratios_per_token() -> None:
    runs = [Pair(cost(1.02, substrate_s=0.0102), cost(1.0), identical=True) for _ in range(3)]
    values = idle.summary(runs)
    assert values["substrate_share"] == 0.005
    assert values["substrate_us_per_step"] == 102.0
    assert values["cpu_per_token_over_native"]["median"] == 1.02
    assert values["wall_per_token_over_native"]["interval"] == [1.02, 1.02]


@pytest.mark.parametrize(
    ("cpu_s", "substrate_s", "identical", "expected"),
    [
        (1.01, 0.02, True, True),
        (1.02, 0.02, True, False),
        (1.01, 0.03, True, False),
        (1.01, 0.02, False, False),
    ],
)
def test_the_idle_bar(cpu_s: float, substrate_s: float, identical: bool, expected: bool) -> None:
    run = Pair(cost(cpu_s, substrate_s=substrate_s), cost(1.0), identical)
    assert idle.holds(idle.summary([run])) is expected


# ---- speed ----------------------------------------------------------------------------------------------------------


def test_speed_counts_the_first_interval_in_the_whole_only() -> None:
    native = [cost(1.0)] * 4
    measured = {"native": native, "random": [cost(1.7), *[cost(0.5)] * 3], "streaming_llm": native}
    values = speed.summary([measured] * 3)
    assert values["random"]["whole"] == {"median": 1.25, "interval": [1.25, 1.25], "pairs": 3}
    assert values["random"]["whole_wall"]["median"] == 1.25
    assert values["random"]["later"]["median"] == 2.0
    assert values["streaming_llm"]["whole"]["median"] == 1.0


@pytest.mark.parametrize(("short", "long"), [*product([0.96, 0.98], [0.99, 1.01])])
def test_the_speed_bar_depends_on_the_length(short: float, long: float) -> None:
    def whole(random: float, streaming: float) -> dict[str, dict[str, dict[str, float]]]:
        return {"random": {"whole": {"median": random}}, "streaming_llm": {"whole": {"median": streaming}}}

    values = {"512": whole(short, 1.5), "2048": whole(1.5, long), "4096": whole(0.1, 0.1)}
    assert speed.holds(values) is (short == 0.98 and long == 1.01)


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 4, 12])
@pytest.mark.parametrize("place", rows.NATIVE.values())
def test_native_rows_own_different_blocks_of_the_pool(place: rows.Layout, batch: int) -> None:
    case = Case(9, 3, 64, torch.bfloat16, live=512, batch=batch)
    blocks = np.array(place(case, random.Random(0)))
    assert blocks.shape == (batch, 32)
    assert len(set(blocks.flatten().tolist())) == batch * 32
    assert set(blocks.flatten().tolist()) <= set(range(rows.pool_size(case)))


@pytest.mark.parametrize("batch", [1, 4])
def test_blocks_of_a_used_pool_are_scattered(batch: int) -> None:
    """A row alone, too: the pool is that of several requests."""
    steps = np.diff(rows.used(Case(9, 3, 64, torch.bfloat16, live=512, batch=batch), random.Random(0)))
    assert np.mean(steps == 1) < 0.1
    assert np.mean(steps == -1) < 0.1, "nor in the order in which an ended request gave them back"


def test_rows_forgive_a_noisy_case_but_no_certain_one() -> None:
    fine, noisy, slow = Ratio(1.0, 0.99, 1.01, 9), Ratio(1.03, 1.01, 1.05, 9), Ratio(1.05, 1.03, 1.07, 9)
    assert rows.holds({"all": fine, "a": fine, "b": noisy})
    assert not rows.holds({"all": fine, "a": fine, "b": slow})
    assert not rows.holds({"all": noisy, "a": fine})
