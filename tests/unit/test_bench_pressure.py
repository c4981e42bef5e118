"""`vtoken bench pressure` counts what is good, and each of its bars can fail."""

import pytest

from vtoken.bench.pressure import BASELINES, TPOT_S, TTFT_S, Tally, events, judge


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


@pytest.mark.parametrize(
    ("tight", "easy", "passed"),
    [
        (results(1.2, 1.0, 5, 10), EASY, True),
        (results(1.05, 1.0, 5, 10), EASY, False),
        (results(1.2, 1.0, 6, 10), EASY, False),
        (results(1.2, 1.0, 5, 10), {**EASY, "room": {"good_per_s": 0.9}}, False),
    ],
)
def test_room_must_beat_the_best_rule_preempt_half_and_cost_nothing_without_pressure(tight, easy, passed):
    assert judge(tight, easy).passed is passed


def test_events_end_at_blank_lines_only_however_they_are_cut():
    """A model may say what Unicode calls a line's end, raw in JSON."""
    stream = 'data: {"text": "a\u2028b\x85c"}\n\ndata: [DONE]\n\n'.encode()
    for cut in range(len(stream)):
        assert [*events([stream[:cut], stream[cut:]])] == stream.split(b"\n\n")[:2]
    assert [*events([b"data: half"])] == []
