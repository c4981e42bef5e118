"""What clients are promised: every request counts for what it says something about, and for nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.errors import ConfigError
from vtoken.core.slo import Answer, Objective, Outcome, ServiceLevel, SloSettings

PROMISE = SloSettings(ttft_s=1.0, tpot_s=0.1, ttft_share=0.9, tpot_share=0.95, success_share=0.99)
seconds = st.none() | st.floats(0, 100)
answers = st.lists(
    st.builds(Answer, st.sampled_from([200, 400, 404, 429, 499, 500, 503]), st.booleans(), seconds, seconds, seconds)
)


def counted(given_answers):
    """The dumb twin: one pass per question."""
    served = [one for one in given_answers if one.status < 400 and not one.broken]
    failed = [one for one in given_answers if one.status != 499 and (one.status >= 500 or one.broken)]
    first = [one.ttft_s for one in served if one.ttft_s is not None]
    gone = [one for one in given_answers if one.status == 499 and one.waited_s is not None and one.waited_s > 1.0]
    later = [one.tpot_s for one in served if one.tpot_s is not None]
    return {
        "success": (len(served), len(failed)),
        "ttft": (sum(one <= 1.0 for one in first), sum(one > 1.0 for one in first) + len(gone)),
        "tpot": (sum(one <= 0.1 for one in later), sum(one > 0.1 for one in later)),
    }


@given(answers)
def test_objectives_are_met_and_missed_as_often_as_a_recount_says(given_answers):
    level = ServiceLevel(PROMISE)
    for answer in given_answers:
        level.note(answer)
    told = level.to_mapping()
    assert {name: (one["met"], one["missed"]) for name, one in told["slo"].items()} == counted(given_answers)
    assert told["requests_total"] == {
        outcome: Counter(one.outcome for one in given_answers)[outcome] for outcome in Outcome
    }
    assert sum(told["requests_total"].values()) == len(given_answers)
    served = [one for one in given_answers if one.outcome is Outcome.SERVED]
    for name in ("ttft", "tpot"):
        seen = told[f"{name}_seconds"]
        times = [getattr(one, f"{name}_s") for one in served]
        assert seen["count"] == sum(seen["at_most"].values()) == len(times) - times.count(None)


@pytest.mark.parametrize(("waited_s", "missed"), [(None, 0), (1.0, 0), (1.1, 1)])
def test_a_client_that_leaves_after_a_first_token_was_due_was_promised_more_than_it_got(waited_s, missed):
    level = ServiceLevel(PROMISE)
    level.note(Answer(499, waited_s=waited_s))
    told = level.to_mapping()
    assert {name: (one["met"], one["missed"]) for name, one in told["slo"].items()} == {
        "success": (0, 0), "ttft": (0, missed), "tpot": (0, 0),
    }  # fmt: skip
    assert (told["requests_total"]["left"], told["ttft_seconds"]["count"]) == (1, 0)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(200), Outcome.SERVED),
        (Answer(200, broken=True, ttft_s=0.1), Outcome.FAILED),
        (Answer(503), Outcome.FAILED),
        (Answer(429), Outcome.REFUSED),
        (Answer(400), Outcome.INVALID),
        (Answer(499), Outcome.LEFT),
    ],
)
def test_a_request_ends_in_one_way(answer, outcome):
    assert answer.outcome is outcome


def test_targets_are_those_of_the_settings():
    told = ServiceLevel(PROMISE).to_mapping()["slo"]
    assert {name: one["target"] for name, one in told.items()} == {"ttft": 0.9, "tpot": 0.95, "success": 0.99}
    assert PROMISE.share(Objective.TPOT) == 0.95


@pytest.mark.parametrize("impossible", [{"ttft_s": 0}, {"tpot_s": "fast"}, {"success_share": 1.0}, {"ttft_share": 0.4}])
def test_promises_that_can_not_be_are_refused(impossible):
    """A share of 1 would leave no budget: every burn rate would be a division by zero."""
    with pytest.raises(ConfigError, match=next(iter(impossible))):
        SloSettings(**impossible)
