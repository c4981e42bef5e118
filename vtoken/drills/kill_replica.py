"""SIGKILL a replica under streams and unary loops, again and again: no byte is lost, repeated or rewritten."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from vtoken.drills.replays import differences, digits_of, losses
from vtoken.drills.traffic import Recording, Traffic
from vtoken.drills.upheaval import (
    EXACT,
    LOOPS,
    UNARY_BODIES,
    begin_streams,
    failovers,
    judge_answers,
    loop_body,
    recover,
    stream_body,
    unary_loops,
)
from vtoken.drills.world import World
from vtoken.results.outcome import Outcome

SETTINGS = EXACT
OWN_FLEET = True

STREAMS, TOKENS, QUICK_TOKENS, BEGUN = 20, 160, 100, 12
KILLS, QUICK_KILLS = 10, 2
SAME_SHARE = 0.95
REPLAYS = 8
"""At once."""


def run(world: World, quick: bool) -> Outcome:
    """Kill, look, wait until two fresh replicas serve; so many times."""
    outcome = Outcome("drill-kill-replica")
    tokens = QUICK_TOKENS if quick else TOKENS
    undisturbed = _undisturbed(world, tokens)
    streams: list[Recording] = []
    recovery_s = []
    with unary_loops(world) as loops:
        for number in range(QUICK_KILLS if quick else KILLS):
            traffic, begun = begin_streams(world, STREAMS, tokens, BEGUN)
            victim, pid = sorted(world.local.replica_pids().items())[number % 2]
            os.kill(pid, signal.SIGKILL)
            recovery_s.append(recover(world, {victim}))
            traffic.join()
            streams += begun
            world.progress(f"kill {number + 1}: two replicas again after {recovery_s[-1]:.0f} s; {failovers(world)}")
    outcome.values["kills"] = len(recovery_s)
    outcome.values["recovery_worst_s"] = round(max(recovery_s), 1)
    outcome.values["failovers"] = failovers(world)
    judge_answers(outcome, "stream", streams)
    judge_answers(outcome, "unary", loops.recordings)
    _judge_texts(outcome, [*streams, *loops.recordings], undisturbed)
    _judge_replays(outcome, world, streams)
    return outcome


def _undisturbed(world: World, tokens: int) -> dict[str, str]:
    """The text of every request of this drill, by its message, with nothing in the way."""
    traffic = Traffic(world.url)
    for index in range(STREAMS):
        traffic.start(stream_body(world, index, tokens))
    for loop in range(LOOPS):
        for turn in range(UNARY_BODIES):
            traffic.start(loop_body(world, loop, turn))
    traffic.join()
    return {_message(recording): recording.text for recording in traffic.recordings}


def _message(recording: Recording) -> str:
    return str(recording.body["messages"][0]["content"])


def _judge_texts(outcome: Outcome, recordings: list[Recording], undisturbed: dict[str, str]) -> None:
    same = sum(recording.text == undisturbed[_message(recording)] for recording in recordings)
    share = same / len(recordings)
    outcome.values["same_as_undisturbed"] = round(share, 4)
    outcome.expect(share >= SAME_SHARE, f"{share:.1%} of the texts are those of the undisturbed run")


def _judge_replays(outcome: Outcome, world: World, streams: list[Recording]) -> None:
    lost = losses(world.local.logs)
    resumed = [recording for recording in streams if digits_of(recording) in lost]
    with ThreadPoolExecutor(REPLAYS) as pool:
        found = pool.map(lambda recording: differences(world, recording, lost[digits_of(recording)]), resumed)
        wrong = [line for lines in found for line in lines]
    outcome.values["streams_resumed"] = len(resumed)
    outcome.values["replays_different"] = len(wrong)
    outcome.expect(bool(resumed), "no stream was on a replica that was killed: nothing was tried")
    outcome.expect(not wrong, f"what the engine generates from prompt and prefix is something else: {wrong[:3]}")
