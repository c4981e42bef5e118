"""The flight recorder: bounded, and short where nothing new happens."""

from __future__ import annotations

from vtoken.core.history import ENTRIES_PER_REQUEST, REQUESTS_KEPT, Entry, Event, History, from_mapping, to_mapping


def test_the_last_entries_of_the_last_requests_are_kept() -> None:
    history = History()
    for request in range(REQUESTS_KEPT + 5):
        for step in range(ENTRIES_PER_REQUEST + 3 if request > REQUESTS_KEPT else 1):
            history.record(f"r{request}", Entry(step, Event.EVICT, tokens=1))
    assert history.of("r4") == ()
    assert len(history.of("r5")) == 1
    assert [entry.step for entry in history.of(f"r{REQUESTS_KEPT + 4}")][0::47] == [3, ENTRIES_PER_REQUEST + 2]


def test_the_same_deferral_again_is_counted_not_listed() -> None:
    history = History()
    for step in range(1, 8):
        history.record("a", Entry(step, Event.DEFER, reason="reserve_short"))
    history.record("a", Entry(8, Event.DEFER, reason="no_gain"))
    first, second = history.of("a")
    assert (first.step, first.repeats, second.repeats) == (7, 7, 1)
    assert "defer x7" in str(first)


def test_an_id_that_the_engine_has_lengthened_is_found() -> None:
    history = History()
    names = ["chat-a-0123abcd", "chat-ab-0123abcd", "0_chat-b-4567abcd", "1_chat-b-4567abcd", "cmpl-c-0-89ab4567"]
    for name in names:
        history.record(name, Entry(1, Event.BEGIN))

    def found(request_id: str) -> list[str]:
        return [name for name, _ in history.matching(request_id)]

    assert found("chat-a") == ["chat-a-0123abcd"]
    assert found("chat-b") == ["0_chat-b-4567abcd", "1_chat-b-4567abcd"]
    assert found("cmpl-c") == ["cmpl-c-0-89ab4567"]
    assert all(name in found(name) for name in names)
    assert [found(part) for part in ("", "c", "chat", "chat-", "chat-c", ".*")] == [[]] * 6
    assert "begin" in history.story("chat-a-0123abcd")
    assert history.story("chat-a") == "no decision is on record"


def test_entries_survive_the_wire() -> None:
    entry = Entry(3, Event.DROP, 4, 1, 1, "copy failed", 90, 50, 7, 2)
    assert from_mapping(to_mapping(entry)) == entry
