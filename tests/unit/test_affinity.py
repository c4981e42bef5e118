"""Prefix chains against slices, the index against a plain list, and its bound."""

import hashlib
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.affinity import _MARKS, MAX_MARKS, MAX_REPLICAS, Hit, PrefixIndex, prefix_chain, session_key


@given(st.binary(max_size=3000), st.lists(st.integers(0, 3000), max_size=6))
def test_a_chain_hashes_each_beginning_however_the_prompt_is_cut(text, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    expected = [
        int.from_bytes(hashlib.blake2b(text[:mark], digest_size=8).digest(), "big")
        for mark in _MARKS
        if mark <= len(text)
    ]
    assert list(prefix_chain(pieces)) == expected


def test_marks_rise_and_a_huge_prompt_has_a_bounded_chain():
    assert list(_MARKS) == sorted(set(_MARKS))
    assert len(prefix_chain([b"x" * 100_000] * 20)) == MAX_MARKS


def test_a_session_is_no_beginning():
    assert session_key("x") not in prefix_chain([b"x" * 256])
    assert session_key("a") == session_key("a") != session_key("b")


def test_the_longest_beginning_comes_first_and_the_session_alone_last():
    index, short, long = PrefixIndex(), (1, 2), (1, 2, 3, 4)
    index.enter(short, None, "a")
    index.enter(long, 9, "b")
    index.enter((), 9, "c")
    assert list(index.look(long, 9)) == ["b", "a", "c"]
    assert index.look(long, 9)["a"] == Hit(_MARKS[1], _MARKS[1])
    assert index.look((1, 2, 7), None)["b"].prefix_bytes == _MARKS[1]
    assert index.look((5,), None) == {}


def test_only_what_a_request_inside_holds_is_shared():
    index = PrefixIndex()
    index.enter((1, 2, 3), None, "a")
    index.enter((1, 9), None, "a")
    index.leave((1, 2, 3), None, "a")
    assert index.look((1, 2, 3), None) == {"a": Hit(_MARKS[2], _MARKS[0])}
    index.leave((1, 9), None, "a")
    assert index.look((1, 2, 3), None) == {"a": Hit(_MARKS[2], 0)}


def test_memory_is_bounded_and_what_was_used_last_stays():
    index = PrefixIndex(max_entries=10)
    for number in range(100):
        index.enter((1, 1000 + number), None, f"r{number}")
        assert len(index) <= 10
    assert len(index.look((1,), None)) == MAX_REPLICAS
    assert next(iter(index.look((1, 1099), None))) == "r99"
    assert 1000 not in index._places


def test_random_use_agrees_with_a_plain_list():
    rng, index, log, inside = random.Random(1), PrefixIndex(), [], []
    for _ in range(400):
        if inside and rng.random() < 0.45:
            chain, replica = inside.pop(rng.randrange(len(inside)))
            index.leave(chain, None, replica)
        else:
            chain = tuple(rng.choice(["x", "y"]) + "z" * n for n in range(rng.randint(1, 4)))
            replica = rng.choice("ab")
            index.enter(chain, None, replica)
            log.append((chain, replica))
            inside.append((chain, replica))
        asked = tuple(rng.choice(["x", "y"]) + "z" * n for n in range(4))
        expected = {}
        for depth, key in enumerate(asked):
            for replica in {place for chain, place in log if key in chain}:
                held = any(key in chain for chain, place in inside if place == replica)
                before = expected.get(replica, Hit(0, 0)).shared_bytes
                expected[replica] = Hit(_MARKS[depth], _MARKS[depth] if held else before)
        assert index.look(asked, None) == expected
