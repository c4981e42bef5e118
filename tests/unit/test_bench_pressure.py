"""`vtoken bench pressure` counts what is good, and each of its bars can fail."""

import pytest

from vtoken.bench.pressure import BASELINES, judge
from vtoken.bench.pressure_clients import TPOT_S, TTFT_S, Tally, events
from vtoken.results.ratio import Ratio


def test_only_whole_answers_in_time_are_good():
    tally = Tally()
    tally.note(
        200, whole=True, times_s=[TTFT_S, TTFT_S + 9 * TPOT_S, TTFT_S + 10 * TPOT_S], start_s=0.0
    )  # 5 times the limit on average
    tally.note(200, whole=True, times_s=[0.1, 0.2, 0.3], start_s=0.0)
    tally.note(200, whole=True, times_s=[TTFT_S * 1.01], start_s=0.0)
    tally.note(200, whole=False, times_s=[0.1], start_s=0.0)
    tally.note(429, whole=False, times_s=[], start_s=0.0)
    assert (tally.good, tally.late, tally.failed) == (1, 2, 2)


def results(room, best, preemptions, of_round_robin):
    found = {mode: {"good_per_s": best / 2, "preemptions": of_round_robin} for mode in BASELINES}
    found["least_kv"]["good_per_s"] = best
    return {**found, "room": {"good_per_s": room, "preemptions": preemptions}}


EASY = {"power_of_two": {"good_per_s": 1.0}, "room": {"good_per_s": 0.99}}
LEVEL, YOUNG = Ratio(0.99, 0.9, 1.1, 6), {"count": 9, "p50": 0.05, "p99": 0.2}


@pytest.mark.parametrize(
    ("tight", "share", "age_s", "failure"),
    [
        (results(1.2, 1.0, 5, 10), LEVEL, YOUNG, None),
        (results(1.05, 1.0, 5, 10), LEVEL, YOUNG, "goodput 1.050 x"),
        (results(1.2, 1.0, 6, 10), LEVEL, YOUNG, "6 preemptions beside 10"),
        (
            results(1.2, 1.0, 5, 10),
            Ratio(0.9, 0.8, 1.0, 6),
            YOUNG,
            "0.9000 [0.8000, 1.0000] of 6 pairs of power of two",
        ),
        (results(1.2, 1.0, 5, 10), LEVEL, {**YOUNG, "p99": 0.3}, "telemetry up to 0.3 s old"),
        (results(1.2, 1.0, 5, 10), LEVEL, {"count": 0, "p50": None, "p99": None}, "telemetry up to None s old"),
    ],
)
def test_room_must_beat_the_best_rule_preempt_half_and_cost_nothing_without_pressure(tight, share, age_s, failure):
    outcome = judge(tight, EASY, share, age_s)
    assert len(outcome.failures) == (failure is not None)
    assert all(said.startswith(failure) for said in outcome.failures)


def test_events_end_at_blank_lines_only_however_they_are_cut():
    """A model may say what Unicode calls a line's end, raw in JSON."""
    stream = 'data: {"text": "a\u2028b\x85c"}\n\ndata: [DONE]\n\n'.encode()
    for cut in range(len(stream)):
        assert [*events([stream[:cut], stream[cut:]])] == stream.split(b"\n\n")[:2]
    assert [*events([b"data: half"])] == []
