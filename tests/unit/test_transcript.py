"""What a client was sent and the tokens behind it: cut anywhere, the whole is that of an undisturbed run."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.transcript import DONE, Fingerprint, News, NotResumable, Progress, Resume, TokenGroups, Transcript

groups_of = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=12)


# ---- Groups of token ids ---------------------------------------------------------------------------------------------


@given(groups_of, groups_of)
def test_groups_come_back_as_they_were_put_in(first, then):
    groups = TokenGroups(first)
    groups.extend(then)
    assert list(groups) == first + then
    assert len(groups) == len(first + then)
    assert groups.ids == [token for group in first + then for token in group]
    assert groups.tokens == len(groups.ids)
    assert pickle.loads(pickle.dumps(groups)) == groups


# ---- A scripted engine: chunks are a function of the groups ----------------------------------------------------------


def chunk_of(group, finish, created, seen):
    """As vLLM writes them; `seen` tokens came before, so that no two chunks are alike by chance."""
    fields = f'"id":"chatcmpl-1","object":"chat.completion.chunk","created":{created}'
    return f'data: {{{fields},"text":"{seen}:{group}","finish":"{finish}"}}\n\n'


def attempt(script, resume, created, lookahead):
    """(chunk, news) of a replica that is given `resume`; it may know of tokens before their chunk is sent."""
    progress = Progress(resume)
    given_groups = [tuple(group) for group in resume.groups]
    groups = given_groups + [tuple(group) for group in script[len(given_groups) :]]
    seen, items = 0, []
    yield f'data: {{"id":"chatcmpl-1","object":"chat.completion.chunk","created":{created},"role":"x"}}\n\n', None
    for index, group in enumerate(groups):
        finish = ("length", None) if index == len(script) - 1 else None
        if index >= len(given_groups):
            progress.add(group, finish)
        items.append(chunk_of(group, finish, created, seen))
        seen += len(group)
        if len(items) > lookahead:
            yield items.pop(0), progress.take()
    for item in items:
        yield item, progress.take()
    yield DONE, None


@given(
    script=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=8),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    lookahead=st.integers(0, 2),
)
def test_whatever_the_cuts_the_client_sees_one_undisturbed_stream(script, cuts, lookahead):
    transcript, sent = Transcript("1"), []
    for number, cut in enumerate([*cuts, 1000]):
        resume, again = transcript.begin(), Fingerprint()
        for count, (event, news) in enumerate(attempt(script, resume, 1000 + number, lookahead)):
            if count == cut:
                break
            transcript.learn(news)
            if again.events < resume.delivered:
                again.add(event)
                if again.events == resume.delivered:
                    transcript.check(again.hex)
                continue
            sent.append(transcript.deliver(event))
        if transcript.ended:
            break
    created = 1000 + next(number for number, cut in enumerate([*cuts, 1000]) if cut)  # of the first that sent anything
    assert sent == [chunk for chunk, _ in attempt(script, Resume("1"), created, 0)]
    assert transcript.ended
    assert transcript.tokens == sum(map(len, script))


def test_a_replica_that_repeats_something_else_is_not_believed():
    transcript = Transcript("1")
    transcript.begin()
    for chunk in ("data: a\n\n", "data: b\n\n"):
        transcript.deliver(chunk)
    assert transcript.begin().delivered == 2
    other = Fingerprint()
    for event in ("data: a\n\n", "data: B\n\n"):
        other.add(event)
    with pytest.raises(NotResumable, match="first 2 events"):
        transcript.check(other.hex)


def test_nor_is_one_that_says_nothing_about_what_was_sent():
    transcript = Transcript("1")
    transcript.begin()
    transcript.deliver("data: a\n\n")
    transcript.begin()
    with pytest.raises(NotResumable, match="1 that were sent"):
        transcript.deliver("data: b\n\n")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('data: {"id":"c","object":"o","created":7,"x":1}', 'data: {"id":"c","object":"o","created":8,"x":1}', True),
        ('data: {"id":"c","object":"o","created":7,"x":1}', 'data: {"id":"c","object":"o","created":7,"x":2}', False),
        ('data: {"x":"\\"created\\":7"}', 'data: {"x":"\\"created\\":8"}', False),
    ],
)
def test_fingerprints_differ_unless_only_the_time_does(one, other, same):
    first, second = Fingerprint(), Fingerprint()
    first.add(one)
    second.add(other)
    assert (first.hex == second.hex) is same


def test_an_obstacle_matters_once_the_client_has_seen_something():
    transcript = Transcript("1")
    transcript.begin()
    transcript.obstacle = "seed"
    transcript.learn(News(((1, 2),)))
    assert transcript.begin() == Resume("1")
    assert transcript.tokens == 0
    transcript.deliver("data: a\n\n")
    with pytest.raises(NotResumable, match="`seed`") as caught:
        transcript.begin()
    assert caught.value.param == "seed"


def test_what_a_client_writes_is_never_taken_for_the_time():
    transcript = Transcript("1")
    transcript.begin()
    first = 'data: {"id":"c","object":"o","created":7,"x":"\\"created\\":8"}\n\n'
    assert transcript.deliver(first) == first
    later = 'data: {"id":"c","object":"o","created":9,"x":"\\"created\\":8"}\n\n'
    assert transcript.deliver(later) == later.replace(":9,", ":7,")
    assert transcript.deliver('data: {"x":"\\"created\\":8"}\n\n') == 'data: {"x":"\\"created\\":8"}\n\n'


def test_progress_reports_every_group_once():
    progress = Progress(Resume("1", TokenGroups([[1, 2]])))
    assert (progress.tokens, progress.take()) == (2, None)
    progress.add([3])
    progress.add([], ("stop", "END"))
    assert progress.take() == News(((3,), ()), ("stop", "END"))
    assert (progress.tokens, progress.take()) == (3, None)
