"""What the drills overload and fuzz count and find."""

from vtoken.drills.fuzz import leaks
from vtoken.drills.fuzz_cases import CANARY, by_hand, from_document
from vtoken.drills.overload import Tally, _judge_memory
from vtoken.results.outcome import Outcome
from vtoken.serving.limit_settings import LimitSettings
from vtoken.serving.openapi import document


def test_a_secret_in_any_log_is_found(tmp_path):
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "ingress.log").write_bytes(b"\xff a " + CANARY.encode())
    (tmp_path / "other.log").write_text("nothing")
    assert leaks(tmp_path, [CANARY, "sk-key"]) == ["ingress.log"]
    (tmp_path / "other.log").write_text("Bearer sk-key")
    assert leaks(tmp_path, [CANARY, "sk-key"]) == ["other.log", "ingress.log"]


def test_the_full_drill_sends_two_hundred_requests_and_more_and_the_same_ones_every_time():
    told = document("m", LimitSettings())
    hand = list(by_hand("m", "sk-key-0001"))
    made = from_document(told, 8, seed=3)
    assert len(hand) + 100 >= 200
    assert [case.content for case in from_document(told, 8, seed=3)] == [case.content for case in made]
    assert {case.path for case in made} == {"/v1/chat/completions", "/v1/completions"}
    assert any(case.half_close for case in hand)
    assert any(case.pieces > 1 for case in hand)
    assert any(len(case.content) > 20_000_000 for case in hand)


def test_only_200_and_a_429_with_a_time_are_right_answers():
    tally = Tally()
    tally.note(429, 0, "2", "")
    tally.note(200, 1, None, "")
    tally.note(429, 1, None, "no time")
    tally.note(503, 0, "1", "gone")
    tally.note(0, 0, None, "hung")
    assert (tally.answered, tally.refused, tally.first_retries, tally.let_in) == (1, 1, 2, 1)
    assert (tally.wrongs, tally.wrong) == (3, ["no time", "gone", "hung"])


def test_memory_is_judged_from_the_second_quarter_to_the_last():
    outcome = Outcome("overload")
    _judge_memory(outcome, [1, *[100] * 7, *[104] * 8])
    assert outcome.passed
    _judge_memory(outcome, [1, *[100] * 7, *[106] * 8])
    assert not outcome.passed
