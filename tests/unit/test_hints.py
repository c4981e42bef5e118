"""Beginnings and sessions: equal where prompts are, different where they are not, and total."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.core.config import VTokenConfig
from vtoken.core.routing import RoutingTunables, demand_tokens
from vtoken.serving.hints import MAX_SESSION_CHARS, prefix_of, session_of
from vtoken.serving.limits import hint_for

SYSTEM = {"role": "system", "content": "You are helpful. " * 40}


def chat(*contents, **more):
    return {"messages": [SYSTEM, *({"role": "user", "content": content} for content in contents)], **more}


def shared(first, second):
    return sum(a == b for a, b in zip(first, second, strict=False))


def test_requests_with_one_system_prompt_share_its_beginning_only():
    first, second = prefix_of("chat", chat("a" * 900)), prefix_of("chat", chat("b" * 900))
    assert 0 < shared(first, second) < len(first) == len(second)


def test_a_conversation_that_goes_on_keeps_its_beginning():
    before, after = prefix_of("chat", chat("a" * 900)), prefix_of("chat", chat("a" * 900, "more" * 200))
    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_roles_and_tools_are_part_of_the_prompt():
    plain = chat("x" * 900)
    other = {"messages": [{**message, "role": "tool"} for message in plain["messages"]]}
    assert shared(prefix_of("chat", plain), prefix_of("chat", other)) == 0
    assert shared(prefix_of("chat", plain), prefix_of("chat", {**plain, "tools": [{"type": "function"}]})) == 0


def test_completions_have_beginnings_as_text_and_as_tokens_but_not_several_prompts():
    assert prefix_of("completion", {"prompt": "x" * 900}) == prefix_of("completion", {"prompt": ["x" * 900]}) != ()
    assert len(prefix_of("completion", {"prompt": list(range(300))})) > 0
    assert prefix_of("completion", {"prompt": ["x" * 900, "y" * 900]}) == ()


def test_the_cache_key_names_the_session_before_the_user_does():
    assert session_of({"user": "u"}) == session_of({"user": "u", "model": "m"}) is not None
    assert session_of({"user": "u", "prompt_cache_key": "k"}) == session_of({"prompt_cache_key": "k"})
    assert session_of({}) is session_of({"user": ""}) is session_of({"user": "u" * (MAX_SESSION_CHARS + 1)}) is None


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(["chat", "completion"]), junk, junk, junk)
def test_any_body_has_a_hint(kind, content, prompt, user):
    body = {"messages": content, "prompt": prompt, "user": user, "tools": content}
    assert isinstance(prefix_of(kind, body), tuple)
    assert session_of(body) is None or isinstance(user, str)


def test_without_a_prefix_cache_nothing_is_hashed():
    hint = hint_for("chat", chat("x" * 900, user="u"), VTokenConfig(), RoutingTunables(affinity_room_share=0.0))
    assert (hint.prefix_chain, hint.session) == ((), None)
    hint = hint_for("chat", chat("x" * 900, user="u"), VTokenConfig(), RoutingTunables())
    assert hint.prefix_chain
    assert hint.session is not None


POLICY = {"policy": "streaming_llm", "budget_tokens": 128}


@pytest.mark.parametrize(
    ("policy", "chunk_tokens", "tokens"),
    [
        (POLICY, 256, 1001),  # not between chunks: the whole prompt lies there before anything is evicted
        ({**POLICY, "between_chunks": True}, 0, 1001),
        ({**POLICY, "between_chunks": True}, 256, 128 + 256),
        ({**POLICY, "between_chunks": True, "min_prompt_tokens": 1}, 256, 1001),
        ({"policy": "streaming_llm", "keep_ratio": 0.25}, 256, 1001),
        ({"policy": "streaming_llm", "keep_ratio": 0.25, "between_chunks": True}, 256, 251 + 256),
    ],
)
def test_the_demand_is_the_most_that_lies_in_memory_at_once(policy, chunk_tokens, tokens):
    tunables = RoutingTunables(chunk_tokens=chunk_tokens)
    config = VTokenConfig.from_mapping({"policy": policy})
    hint = hint_for("completion", {"prompt": "x" * 4000, "max_tokens": 100}, config, tunables)
    assert demand_tokens(hint, tunables) == tokens


@pytest.mark.parametrize("policy", [POLICY, {"policy": "streaming_llm", "keep_ratio": 0.25}, {"policy": "none"}])
def test_every_prompt_and_every_answer_to_it_is_a_sequence_of_its_own(policy):
    config, tunables = VTokenConfig.from_mapping({"policy": policy}), RoutingTunables()

    def demand(prompt, **more):
        hint = hint_for("completion", {"prompt": prompt, "max_tokens": 300, **more}, config, tunables)
        return demand_tokens(hint, tunables)

    one = demand("x" * 399)
    assert demand("x" * 399, n=5) == 5 * one
    assert demand(["x" * 398] * 2, n=5) == 10 * one
