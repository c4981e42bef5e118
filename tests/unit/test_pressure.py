"""Levels: where they change, and that they do not flap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.errors import ConfigError
from vtoken.core.pressure import Level, PressureThresholds, level_after, next_level, room_blocks, room_share
from vtoken.core.telemetry import Snapshot

T = PressureThresholds()
shares = st.floats(0.0, 1.0)
levels = st.sampled_from(list(Level))


def test_falling_and_rising_follow_the_picture():
    level, seen = Level.OPEN, []
    for share in (0.5, 0.15, 0.11, 0.15, 0.19, 0.21, 0.05, 0.01, 0.05, 0.07, 0.5):
        level = next_level(level, share, T)
        seen.append(level.value)
    expected = "open open throttled throttled throttled open throttled closed closed throttled open"
    assert " ".join(seen) == expected


@given(levels, shares)
def test_the_same_report_twice_changes_nothing_more(level, share):
    once = next_level(level, share, T)
    assert next_level(once, share, T) is once


@given(levels, shares, shares)
def test_more_room_never_means_a_stricter_level(level, a, b):
    low, high = sorted((a, b))
    assert next_level(level, high, T).rank <= next_level(level, low, T).rank


@given(st.floats(0.121, 0.199), levels)
def test_small_noise_inside_a_band_does_not_flap(share, level):
    seen = {next_level(level, share + delta, T) for delta in (0.0, 0.0005, -0.0005)}
    assert len(seen) == 1


@given(levels)
def test_a_middle_share_never_closes_and_a_free_replica_is_open(level):
    assert next_level(level, 0.5, T) is Level.OPEN
    assert next_level(level, 0.0, T) is Level.CLOSED


def test_room_counts_reclaimable_by_confidence_and_owes_the_missing_headroom():
    shot = Snapshot(
        capacity_blocks=100, free_blocks=40, reserved_blocks=2, headroom_target_blocks=8, reclaimable_blocks=20
    )
    assert room_blocks(shot, 0.5) == 40 + 10 - 6
    assert room_share(shot, 0.5) == pytest.approx(0.44)


def test_an_engine_that_has_not_stepped_is_open():
    assert level_after(Level.OPEN, Snapshot(), T, 0.5) is Level.OPEN


@pytest.mark.parametrize(
    "wrong",
    [
        {"close_below": 0.5},
        {"close_below": -0.1},
        {"open_above": 1.5},
        {"reopen_above": "much"},
        {"throttle_below": 0.2, "open_above": 0.2},
    ],
)
def test_thresholds_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        PressureThresholds(**wrong)
