"""A request's way through replicas that are lost under it; scripted replicas stand for Serve's handle."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from vtoken.core.blame import cause_of
from vtoken.core.failover import Failover, FailoverRules
from vtoken.core.replies import ErrorReply, replica_lost
from vtoken.core.routing import RouteHint
from vtoken.core.transcript import DONE, Fingerprint, News
from vtoken.serving import visit
from vtoken.serving.access_log import AccessRecord
from vtoken.serving.journey import Fleet, Journey

ANSWER = [11, 12, 13, 14, 15, 16]


@pytest.fixture(autouse=True, scope="module")
def hurry():
    """No pauses between attempts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vtoken.serving.journey.PAUSE_S", 0.0)
        yield


class Call:
    """What a handle's streaming call returns. As Serve's, one that failed before it reached a replica fails again when
    it is cancelled.
    """

    def __init__(self, script):
        self.script, self.cancelled, self.reached, self.failure = script, False, False, None

    async def __anext__(self):
        try:
            item = next(self.script)
        except StopIteration:
            raise StopAsyncIteration from None
        if isinstance(item, BaseException):
            self.failure = None if self.reached else item
            raise item
        if item == "hang":
            await asyncio.sleep(60)
        self.reached = True
        return item

    def __aiter__(self):
        return self

    def cancel(self):
        self.cancelled = True
        if isinstance(self.failure, Exception):
            raise self.failure


class Replicas:
    """Stands for `handle.generate`: attempt i runs `scripts[i](resume)`, the last script again and again."""

    def __init__(self, *scripts):
        self.scripts, self.calls, self.resumes = scripts, [], []

    def remote(self, _hint, _kind, _body, resume):
        script = self.scripts[min(len(self.calls), len(self.scripts) - 1)]
        self.resumes.append(resume)
        self.calls.append(Call(iter(script(resume))))
        return self.calls[-1]


def replayed(items, delivered):
    """As a replica sends them of which the client has seen so many events."""
    again = Fingerprint()
    for _, event, _ in items[1 : 1 + delivered]:
        again.add(event)
    return items[:1] + ([("replayed", again.hex, None)] if delivered else []) + items[1 + delivered :]


def stream(name, cut=None, ending=None, obstacle=None, created=7):
    """A replica that streams ANSWER token by token; after `cut` items behind the first it comes to `ending`."""

    def script(resume):
        yield "accepted", name, None
        items = [("stream", obstacle, None)]
        known = resume.groups.ids
        for place, token in enumerate([*known, *ANSWER[len(known) :]]):
            news = None if place < len(known) or obstacle else News(((token,),))
            head = f'data: {{"id":"chatcmpl-{resume.request_id}","object":"o","created":{created},'
            items.append(("chunk", f'{head}"text":"{place}:{token}"}}\n\n', news))
        items.append(("chunk", DONE, None))
        yield from replayed(items, resume.delivered)[:cut]
        if cut is not None and ending is not None:
            yield ending

    return script


def journey(replicas, living=True, **rules):
    async def alive():
        return living

    fleet = Fleet(replicas, FailoverRules(**rules), 3.0, alive)
    return fleet, Journey(fleet, RouteHint(), "chat", {})


def run(replicas, **more):
    """(items, failovers) of one request."""
    fleet, one = journey(replicas, **more)

    async def collect():
        return [item async for item in one.items()]

    return asyncio.run(collect()), dict(fleet.failovers_total)


def text(items):
    return "".join(event.replace('created":8', 'created":7') for what, event in items if what == "chunk")


def undisturbed(replicas):
    """What a client sees that gets all from one replica, under the id of this request."""
    items, _ = run(Replicas(stream("z")))
    (name,) = {resume.request_id for resume in replicas.resumes}
    whole = text(items)
    return whole.replace(whole[len('data: {"id":"chatcmpl-') :][:32], name)


LOST = RayActorError()
ENGINE_DIED = ("error", replica_lost(), None)
MOVED = ("moved", None, None)


def test_the_visit_hears_of_every_replica_that_accepts_the_request(monkeypatch):
    this, accepted = visit.Visit("k", AccessRecord("")), []
    this.at_replica(accepted.append)
    monkeypatch.setattr(visit, "current", lambda: this)
    run(Replicas(stream("a", 2, LOST), stream("b")))
    assert (accepted, this.record.replica) == (["a", "b"], "b")


@given(
    cuts=st.lists(st.tuples(st.integers(0, len(ANSWER) + 2), st.sampled_from([LOST, ENGINE_DIED, MOVED])), max_size=3)
)
def test_wherever_replicas_are_lost_the_client_sees_one_stream(cuts):
    disturbed = [stream(f"r{index}", cut, ending, created=7 + index % 2) for index, (cut, ending) in enumerate(cuts)]
    replicas = Replicas(*disturbed, stream("last"))
    items, failovers = run(replicas, attempts=9)
    assert [what for what, _ in items] == ["stream"] + ["chunk"] * (len(ANSWER) + 1)
    created = {event.split('"created":')[1][0] for what, event in items if what == "chunk" and event != DONE}
    assert len(created) == 1
    assert text(items).replace('created":8', 'created":7') == undisturbed(replicas)
    assert sum(failovers.values()) == len(replicas.calls) - 1
    assert failovers.get(Failover.MOVED, 0) == [ending for _, ending in cuts[: len(replicas.calls) - 1]].count(MOVED)


def test_a_stream_that_ends_without_its_last_event_goes_on_elsewhere():
    replicas = Replicas(stream("a", 3), stream("b"))
    items, failovers = run(replicas)
    assert text(items) == undisturbed(replicas)
    assert failovers == {Failover.RESUMED: 1}


def test_a_unary_answer_is_made_elsewhere_from_the_tokens_that_are_known():
    def lost(_resume):
        yield "accepted", "a", None
        yield "tokens", None, News(((11, 12),))
        yield "tokens", None, News(((13,),))
        yield LOST

    def answers(resume):
        yield "accepted", "b", None
        yield "json", {"known": resume.groups.ids}, None

    replicas = Replicas(lost, answers)
    assert run(replicas) == ([("json", {"known": [11, 12, 13]})], {Failover.RESUMED: 1})
    assert len({resume.request_id for resume in replicas.resumes}) == 1


def test_what_can_not_go_on_begins_again_while_the_client_has_seen_nothing():
    items, failovers = run(Replicas(stream("a", 1, LOST, obstacle="seed"), stream("b", obstacle="seed")))
    assert len(items) == len(ANSWER) + 2
    assert failovers == {Failover.RESTARTED: 1}


def test_and_ends_with_an_error_that_says_why_once_it_has():
    items, failovers = run(Replicas(stream("a", 3, LOST, obstacle="seed"), stream("b", obstacle="seed")))
    assert [what for what, _ in items] == ["stream", "chunk", "chunk", "error"]
    reply = items[-1][1]
    assert (reply.status, reply.code, reply.param, reply.retry_after_s) == (503, "not_resumable", "seed", 3.0)
    assert failovers == {Failover.NOT_RESUMABLE: 1}


def test_a_request_that_ends_every_replica_stops_after_two():
    replicas = Replicas(stream("a", 1, LOST), stream("b", 1, LOST), stream("c"))
    items, failovers = run(replicas)
    assert (items[-1][1].status, items[-1][1].code) == (500, "poison_request")
    assert len(replicas.calls) == 2
    assert failovers == {Failover.RESTARTED: 1, Failover.POISON: 1}


def test_a_replica_that_is_dead_already_is_no_second_loss():
    again = [stream("a", 0, ENGINE_DIED)] * 4
    items, failovers = run(Replicas(stream("a", 4, ENGINE_DIED), *again, stream("b")))
    assert items[-1] == ("chunk", DONE)
    assert Failover.POISON not in failovers


def test_failover_can_be_turned_off():
    items, failovers = run(Replicas(stream("a", 1, LOST), stream("b")), attempts=1)
    assert [what for what, _ in items] == ["stream", "error"]
    assert (items[-1][1].code, failovers) == ("replica_lost", {})


def unreachable(error):
    def script(_resume):
        yield error

    return script


def test_a_full_fleet_refuses_newcomers_but_not_a_request_that_it_has_begun():
    full = unreachable(BackPressureError(9, 8))
    items, _ = run(Replicas(full))
    assert [(what, reply.code) for what, reply in items] == [("error", "overloaded")]
    items, _ = run(Replicas(stream("a", 3, LOST), full, full, stream("b")))
    assert items[-1] == ("chunk", DONE)


@pytest.mark.parametrize("script", [unreachable(DeploymentUnavailableError("engine")), lambda _resume: iter(["hang"])])
def test_without_any_replica_it_waits_so_long_and_no_longer(script, monkeypatch):
    monkeypatch.setattr("vtoken.serving.journey.LOOK_S", 0.01)
    replicas = Replicas(stream("a", 3, LOST), script)
    items, failovers = run(replicas, living=False, wait_s=0.1)
    assert (items[-1][0], items[-1][1].code) == ("error", "replica_lost")
    assert failovers[Failover.NO_REPLICA] == 1
    assert replicas.calls[-1].cancelled


def test_a_request_that_nobody_takes_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("vtoken.serving.journey.LOOK_S", 0.01)
    replicas = Replicas(lambda _resume: iter(["hang"]))
    items, _ = run(replicas, living=False, wait_s=0.1)
    assert [(what, reply.code) for what, reply in items] == [("error", "replica_lost")]
    assert replicas.calls[-1].cancelled


def test_a_failure_of_the_request_itself_goes_nowhere_else():
    replicas = Replicas(stream("a", 3, RayTaskError("generate", "trace", ValueError("x"))), stream("b"))
    items, failovers = run(replicas)
    assert (items[-1][1].status, items[-1][1].code, failovers, len(replicas.calls)) == (500, "engine", {}, 1)


def test_nor_does_a_refusal():
    replicas = Replicas(lambda _resume: iter([("accepted", "a", None), ("error", ErrorReply(400, "no"), None)]))
    assert run(replicas) == ([("error", ErrorReply(400, "no"))], {})


class Notes:
    """Keeps what the router is told."""

    def __init__(self):
        self.told = []

    def served(self, replica_id, _sent_s):
        self.told.append(("served", replica_id))

    def failed(self, replica_id, cause=None):
        self.told.append(("failed", replica_id, cause))


def test_the_router_hears_of_failures_with_their_cause_and_of_lost_replicas_without():
    def told(*scripts):
        notes = Notes()
        fleet, one = journey(Replicas(*scripts))
        fleet.notes = lambda: notes

        async def collect():
            return [item async for item in one.items()]

        asyncio.run(collect())
        return notes.told

    def fails(reply):
        return lambda _resume: iter([("accepted", "a", None), ("error", reply, None)])

    broken = ErrorReply(500, "The template is broken.", None, "internal_server")
    assert told(fails(broken)) == [("failed", "a", cause_of(broken))]
    assert told(fails(ErrorReply(400, "no"))) == []
    assert told(stream("a", 3, LOST), stream("b")) == [("failed", "a", None), ("served", "b")]


def test_a_replica_that_writes_something_else_is_not_let_through():
    def other(resume):
        yield "accepted", "b", None
        event = f'data: {{"id":"chatcmpl-{resume.request_id}","object":"o","created":7,"text":"?"}}\n\n'
        yield from replayed([("stream", None, None), ("chunk", event, None), ("chunk", DONE, None)], resume.delivered)

    items, failovers = run(Replicas(stream("a", 2, LOST), other))
    assert [what for what, _ in items] == ["stream", "chunk", "error"]
    assert items[-1][1].code == "not_resumable"
    assert failovers[Failover.NOT_RESUMABLE] == 1


@pytest.mark.parametrize("where", ["first", "second"])
def test_a_client_that_leaves_is_followed_nowhere(where):
    def hangs(_resume):
        yield "accepted", "b", None
        yield "hang"

    replicas = Replicas(*([stream("a", 3, LOST)] if where == "second" else []), hangs, stream("c"))
    _, one = journey(replicas)

    async def leave():
        async def read():
            async for _ in one.items():
                pass

        reading = asyncio.create_task(read())
        start_s = time.monotonic()
        while len(replicas.calls) < len(replicas.scripts) - 1 and time.monotonic() - start_s < 5:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.wait({reading})
        return reading.cancelled()

    assert asyncio.run(leave())
    assert len(replicas.calls) == len(replicas.scripts) - 1
    assert replicas.calls[-1].cancelled


def test_work_that_somebody_else_cancelled_goes_on_elsewhere():
    replicas = Replicas(stream("a", 3, asyncio.CancelledError()), stream("b"))
    items, failovers = run(replicas)
    assert text(items) == undisturbed(replicas)
    assert failovers == {Failover.RESUMED: 1}


@pytest.mark.parametrize("ending", [LOST, ENGINE_DIED, MOVED, asyncio.CancelledError()])
def test_what_happens_to_a_replica_after_the_end_does_not_matter(ending):
    replicas = Replicas(stream("a", len(ANSWER) + 2, ending), stream("b"))
    items, failovers = run(replicas)
    assert items[-1] == ("chunk", DONE)
    assert (len(replicas.calls), failovers) == (1, {})


def test_a_replica_that_takes_a_request_again_and_again_and_brings_it_nowhere_is_given_up():
    items, failovers = run(Replicas(stream("a", 3, ENGINE_DIED), stream("a", 0, ENGINE_DIED)), wait_s=0.05)
    assert (items[-1][0], items[-1][1].code) == ("error", "replica_lost")
    assert failovers[Failover.NO_REPLICA] == 1
