"""The real engine goes on with what another one has begun: float32, greedy, nothing evicted, so nothing may differ."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from vtoken.core.config import VTokenConfig
from vtoken.core.transcript import Progress, Resume, TokenGroups

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

ENGINE = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 16,
    "num_gpu_blocks_override": 128,
    "kv_cache_memory_bytes": 1 << 28,
    "max_num_seqs": 8,
    "enforce_eager": True,
}
KEY = "0123456789abcdef" * 2
TOKENS = 40
QUESTION = {"messages": [{"role": "user", "content": "Tell me about the sea."}]}


class Engine:
    """A service and the loop that it lives on."""

    def __init__(self, model_dir):
        from vtoken.engine.service import EngineService

        self.loop = asyncio.new_event_loop()
        starting = EngineService.start(str(model_dir), "smol", VTokenConfig(), ENGINE)
        self.service = self.loop.run_until_complete(starting)

    def stream(self, body, resume=None):
        """(event, news) of a whole stream; the time in every event is 0."""

        async def read():
            progress = Progress(resume or Resume(KEY))
            run = self.service.chat if "messages" in body else self.service.completion
            events = await run({"model": "smol", "stream": True, **body}, progress)
            return [(re.sub(r'"created":\d+', '"created":0', event), progress.take()) async for event in events]

        return self.loop.run_until_complete(read())

    def unary(self, body, resume=None):
        async def ask():
            run = self.service.chat if "messages" in body else self.service.completion
            return await run({"model": "smol", **body}, Progress(resume or Resume(KEY)))

        return self.loop.run_until_complete(ask())

    def close(self):
        self.loop.run_until_complete(self.service.shutdown())
        self.loop.close()


@pytest.fixture(scope="module")
def engine(model_dir):
    engine = Engine(model_dir)
    yield engine
    engine.close()


def resume_after(items, count):
    """Where another replica begins when `count` events were delivered."""
    news = [news for _, news in items[:count] if news is not None]
    groups = [group for one in news for group in one.groups]
    return Resume(KEY, TokenGroups(groups), news[-1].finish if news else None)


def text_of(items):
    decoded = [json.loads(event.removeprefix("data: ")) for event, _ in items if "[DONE]" not in event]
    choices = [chunk["choices"][0] for chunk in decoded if chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def check_every_cut(engine, body, cuts):
    """Cut after each of so many events; the rest is that of the undisturbed stream."""
    whole = engine.stream(body)
    for cut in [number % len(whole) for number in cuts]:
        resumed = engine.stream(body, resume_after(whole, cut))
        assert text_of(resumed) == text_of(whole), f"cut after {cut} events"
        assert [event for event, _ in resumed[:cut]] == [event for event, _ in whole[:cut]]
        assert resumed[-1][0] == whole[-1][0] == "data: [DONE]\n\n"
        assert resumed[-2][0] == whole[-2][0]  # usage, or the finish reason
    return whole


def test_a_chat_stream(engine):
    body = {**QUESTION, "max_tokens": TOKENS, "temperature": 0.0, "stream_options": {"include_usage": True}}
    check_every_cut(engine, body, [1, 2, 17, TOKENS - 1, TOKENS, TOKENS + 1, TOKENS + 2])


def test_a_completion_with_its_prompt_repeated(engine):
    body = {"prompt": "Once upon a time", "echo": True, "max_tokens": TOKENS, "temperature": 0.0}
    whole = check_every_cut(engine, body, [1, 9, -1])
    assert text_of(whole).startswith("Once upon a time")


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_across_the_cut(engine, keep):
    """It ends in the middle of the text, and begins a token before that."""
    body = {**QUESTION, "max_tokens": TOKENS, "temperature": 0.0}
    whole = engine.stream(body)
    texts = [text_of([item]) for item in whole]
    stop = texts[20][1:] + texts[21] + texts[22]
    assert len(stop) > 3
    stopped = check_every_cut(engine, {**body, "stop": [stop], "include_stop_str_in_output": keep}, range(19, 24))
    assert text_of(stopped) == "".join(texts)[: "".join(texts).index(stop) + (len(stop) if keep else 0)]
    assert '"finish_reason":"stop"' in stopped[-2][0]


def test_characters_of_several_tokens_across_the_cut(engine, model_dir):
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(model_dir))
    parts = sorted(
        {token for text in ("\U0001f9ed\U0001f30a", "\u6d77\u5cf6", "\u20bf") for token in tokenizer.encode(text)}
    )
    assert any("\ufffd" in tokenizer.decode([part]) for part in parts)
    body = {"prompt": "\U0001f9ed\u6d77", "max_tokens": 24, "temperature": 0.0, "allowed_token_ids": parts}
    check_every_cut(engine, body, [3, 6, 7, 8, 9])


def test_tokens_that_must_not_be_repeated(engine):
    body = {**QUESTION, "max_tokens": TOKENS, "temperature": 0.0, "repetition_penalty": 1.4}
    check_every_cut(engine, body, [5, 30])


def test_a_unary_answer(engine):
    body = {**QUESTION, "max_tokens": TOKENS, "temperature": 0.0}
    groups = resume_after(engine.stream(body), TOKENS).groups.ids
    whole = engine.unary(body)
    for known in (0, 1, 20, TOKENS - 1):
        resumed = engine.unary(body, Resume(KEY, TokenGroups([groups[:known]])))
        assert resumed["id"] == whole["id"] == f"chatcmpl-{KEY}"
        assert resumed["choices"] == whole["choices"]
        assert resumed["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("more", "obstacle"),
    [
        ({"n": 2, "temperature": 0.5}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"temperature": 0.5, "top_p": 0.9, "stop": ["x"]}, None),
    ],
)
def test_what_a_stream_can_not_go_on_with_is_said(engine, more, obstacle):
    async def begin():
        progress = Progress(Resume(KEY))
        events = await engine.service.chat(
            {"model": "smol", "stream": True, **QUESTION, "max_tokens": 4, **more}, progress
        )
        await events.aclose()
        return progress.obstacle

    assert engine.loop.run_until_complete(begin()) == obstacle
