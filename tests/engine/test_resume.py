"""Resumed generation: vLLM's own AsyncLLM and output processor over a scripted engine core, cut wherever one likes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.core.config import VTokenConfig, parse_request_options
from vtoken.core.transcript import Progress, Resume, TokenGroups

pytestmark = pytest.mark.filterwarnings("ignore")

KEY = "0123456789abcdef" * 2
CHAT_ID = f"chatcmpl-{KEY}"


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(model_dir))


class Core:
    """Stands for vLLM's client of the engine core: the tokens of a request are a script over all its tokens so far.

    Args:
        script: the whole generation, in groups as they come.
    """

    def __init__(self, script, original_prompt, eos):
        self.script, self.prompt, self.eos = script, original_prompt, eos
        self.requests, self.aborted = [], []

    async def add_request_async(self, request):
        self.requests.append(request)
        known = len(request.prompt_token_ids) - len(self.prompt)
        assert request.prompt_token_ids[: len(self.prompt)] == self.prompt
        left, limit = known, request.sampling_params.max_tokens
        for group in self.script:
            new, left = group[left:], max(0, left - len(group))
            if new and limit > 0:
                new = new[:limit]
                limit -= len(new)
                self.put(request, new, limit)

    def put(self, request, new, limit):
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        output = EngineCoreOutput(request.request_id, list(new))
        if new[-1] == self.eos:
            output.finish_reason = FinishReason.STOP
        elif limit == 0:
            output.finish_reason = FinishReason.LENGTH
        self.outputs.append(output)

    async def abort_requests_async(self, ids):
        self.aborted += ids


def scripted(tokenizer, script, prompt, eos=None):
    """A real AsyncLLM without processes: its core runs `script`, one group after another."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    class Inputs:
        assign_request_id = staticmethod(InputProcessor.assign_request_id)

        def process_inputs(self, request_id, prompt, params, **more):
            return EngineCoreRequest(
                request_id, list(prompt["prompt_token_ids"]), None, params.clone(), None, 0.0, None, None, None
            )

    class Scripted(AsyncLLM):
        errored, is_running = False, True

        def __init__(self):
            self.engine_core = Core(script, prompt, eos)
            self.engine_core.outputs = []
            self.output_processor = OutputProcessor(tokenizer, log_stats=True)
            self.input_processor = Inputs()
            self.vllm_config = SimpleNamespace(
                cache_config=SimpleNamespace(kv_sharing_fast_prefill=False), model_config=None
            )
            self.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
            self.observability_config = SimpleNamespace(otlp_traces_endpoint=None)
            self.model_config = SimpleNamespace(is_encoder_decoder=False)
            self.log_requests, self.admission_stats, self.logger_manager = False, None, None
            self.output_handler = None

        def __del__(self):
            pass

        async def get_supported_tasks(self):
            return ("generate",)

        def _run_output_handler(self):
            if self.output_handler is None:
                self.output_handler = asyncio.get_running_loop().create_task(self.deliver())

        async def deliver(self):
            while True:
                await asyncio.sleep(0)
                if self.engine_core.outputs:
                    output = self.engine_core.outputs.pop(0)
                    self.engine_core.aborted += self.output_processor.process_outputs([output]).reqs_to_abort
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)

    return Scripted()


def generate(tokenizer, script, prompt, params, resume=None, take=None, eos=None, config=None, request_id=CHAT_ID):
    """(outputs as plain tuples, progress, engine) of one run, stopped after `take` outputs."""
    from vtoken.engine.resume import ResumableEngine

    async def run():
        engine = scripted(tokenizer, script, prompt, eos)
        resumable = ResumableEngine(engine, config or VTokenConfig())
        progress = Progress(resume or Resume(KEY))
        resumable.follow(progress)
        given_prompt = {"type": "token", "prompt_token_ids": list(prompt)}
        found = []
        outputs = resumable.generate(given_prompt, params, request_id)
        async for output in outputs:
            (one,) = output.outputs
            found.append((one.text, tuple(one.token_ids), one.finish_reason, one.stop_reason))
            assert output.prompt_token_ids == list(prompt)
            if len(found) == take:
                await outputs.aclose()
                break
        if engine.output_handler is not None:
            engine.output_handler.cancel()
        assert not engine.output_processor.request_states
        return found, progress, engine

    return asyncio.run(run())


def sampling(kind="DELTA", **more):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    given_params = {"temperature": 0.0, "max_tokens": 64, "output_kind": RequestOutputKind[kind], **more}
    return SamplingParams(**given_params)


def grouped(ids, sizes):
    """Ids in groups of these sizes, the rest one by one."""
    groups, ids = [], list(ids)
    for size in sizes:
        if ids:
            groups.append(ids[:size])
            ids = ids[size:]
    return groups + [[one] for one in ids]


TEXTS = [
    "The sea is a wide, cold place. END of it.",
    "\u00e9\u00e8 \U0001f30a\U0001f30a waves \u6d77\u6d77 and \U0001f9ed, END",
    "   leading  and   double spaces\n\n\tEND\n",
]
STOPS = [None, ["END"], ["a wide, cold", "\U0001f9ed"], ["e"]]


@settings(max_examples=150)
@given(
    text=st.sampled_from(TEXTS),
    stop=st.sampled_from(STOPS),
    keep=st.booleans(),
    max_tokens=st.sampled_from([64, 7, 1]),
    min_tokens=st.sampled_from([0, 5]),
    sizes=st.lists(st.integers(1, 4), max_size=6),
    cut=st.integers(0, 70),
    data=st.data(),
)
def test_wherever_a_stream_is_cut_the_rest_is_that_of_an_undisturbed_run(
    tokenizer, text, stop, keep, max_tokens, min_tokens, sizes, cut, data
):
    prompt = tokenizer.encode("Once upon a time, ")
    script = grouped([*tokenizer.encode(text), tokenizer.eos_token_id], sizes)
    params = sampling(
        stop=stop, include_stop_str_in_output=keep, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens)
    )
    shared = {"eos": tokenizer.eos_token_id}
    whole, noted, _ = generate(tokenizer, script, prompt, params, **shared)
    assert whole[-1][2] is not None

    cut = min(cut, len(whole))
    if cut == 0:
        return
    begun, progress, _ = generate(tokenizer, script, prompt, params, take=cut, **shared)
    assert begun == whole[:cut]
    news = progress.take()
    assert [len(group) for group in news.groups] == [len(ids) for _, ids, _, _ in begun]
    assert (news.finish is not None) == (cut == len(whole))
    resume = Resume(KEY, TokenGroups(news.groups), news.finish)
    resumed, more, engine = generate(tokenizer, script, prompt, params, resume, **shared)

    assert resumed[:cut] == begun
    assert "".join(text for text, *_ in resumed) == "".join(text for text, *_ in whole)
    assert [one for _, ids, *_ in resumed for one in ids] == [one for _, ids, *_ in whole for one in ids]
    assert resumed[-1][2:] == whole[-1][2:]
    rest = more.take()
    assert resume.groups.ids + [one for group in (rest.groups if rest else ()) for one in group] == [
        one for group in noted.take().groups for one in group
    ]
    assert bool(engine.engine_core.requests) == (cut < len(whole))


@pytest.mark.parametrize("known", [0, 1, 5, 12])
def test_a_unary_answer_goes_on_from_the_tokens_that_are_known(tokenizer, known):
    """Only its end is put out; the tokens are those of the detokenizer."""
    prompt = tokenizer.encode("Once upon a time, ")
    ids = tokenizer.encode(TEXTS[1])
    params = sampling("FINAL_ONLY", max_tokens=len(ids))
    (whole,), _, _ = generate(tokenizer, [ids], prompt, params)
    resume = Resume(KEY, TokenGroups([ids[:known]]))
    (resumed,), _, engine = generate(tokenizer, grouped(ids, []), prompt, params, resume)
    assert resumed == whole
    (request,) = engine.engine_core.requests
    assert request.sampling_params.max_tokens == len(ids) - known


def test_what_is_known_of_a_unary_answer_is_looked_up(tokenizer):
    from vtoken.engine.resume import ResumableEngine

    async def run():
        ids = tokenizer.encode(TEXTS[0])
        engine = scripted(tokenizer, grouped(ids, [3, 2]), [1, 2, 3])
        resumable = ResumableEngine(engine, VTokenConfig())
        progress = Progress(Resume(KEY))
        resumable.follow(progress)
        outputs = resumable.generate(
            {"type": "token", "prompt_token_ids": [1, 2, 3]}, sampling("FINAL_ONLY", max_tokens=60), CHAT_ID
        )
        resumable.look(progress)
        assert progress.take() is None
        reading = asyncio.create_task(anext(outputs))
        while len(engine.engine_core.outputs) != 3:
            await asyncio.sleep(0)
        resumable.look(progress)
        seen = progress.take()
        resumable.look(progress)
        assert progress.take() is None
        reading.cancel()
        await asyncio.wait({reading})
        engine.output_handler.cancel()
        return ids, seen

    ids, seen = asyncio.run(run())
    (group,) = seen.groups
    assert list(group) == ids[: len(group)]
    assert len(group) == len(ids) - 3


def test_tokens_that_fill_the_limit_need_no_engine(tokenizer):
    ids = tokenizer.encode(TEXTS[0])[:6]
    resume = Resume(KEY, TokenGroups(grouped(ids, [])))
    found, _, engine = generate(tokenizer, [], [1, 2], sampling(max_tokens=6), resume)
    assert found[-1][2] == "length"
    assert engine.engine_core.requests == []


def test_the_engine_is_asked_for_the_rest_only(tokenizer):
    ids = tokenizer.encode(TEXTS[0])
    resume = Resume(KEY, TokenGroups([ids[:4]]))
    params = sampling(max_tokens=len(ids), min_tokens=6, stop=["zzz"])
    _, _, engine = generate(tokenizer, grouped(ids, []), [1, 2], params, resume)
    (request,) = engine.engine_core.requests
    assert request.prompt_token_ids == [1, 2, *ids[:4]]
    assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (len(ids) - 4, 2)
    assert params.max_tokens == len(ids)


@pytest.mark.parametrize(("prompt_tokens", "evicts"), [(2, False), (40, True)])
def test_a_prompt_that_the_policy_leaves_alone_is_left_alone_with_the_known_tokens_too(
    tokenizer, prompt_tokens, evicts
):
    policy = {"policy": "streaming_llm", "budget_tokens": 64, "min_prompt_tokens": 20}
    config = VTokenConfig.from_mapping({"policy": policy})
    ids = list(range(10, 50))
    prompt = list(range(100, 100 + prompt_tokens))
    resume = Resume(KEY, TokenGroups([ids[:30]]))
    _, _, engine = generate(tokenizer, [ids], prompt, sampling(max_tokens=40), resume, config=config)
    (request,) = engine.engine_core.requests
    options = parse_request_options((request.sampling_params.extra_args or {}).get("vtoken"), config.policy)
    assert (len(request.prompt_token_ids) >= options.min_prompt_tokens) is evicts


@pytest.mark.parametrize(
    ("more", "obstacle"),
    [
        ({}, None),
        ({"temperature": 0.9, "top_p": 0.5, "top_k": 7, "min_p": 0.1}, None),
        ({"repetition_penalty": 1.3, "logit_bias": {3: 1.0}, "stop": ["x"], "stop_token_ids": [4]}, None),
        ({"seed": 0}, None),
        ({"extra_args": {"vtoken": "{}"}}, None),
        ({"bad_words": []}, None),
        ({"seed": 0, "temperature": 0.5}, "seed"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -0.1}, "presence_penalty"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"n": 2, "temperature": 0.5}, "n"),
        ({"bad_words": ["x y"]}, "bad_words"),
        ({"extra_args": {"other": 1}}, "extra_args"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_what_depends_on_where_the_prompt_ends_is_an_obstacle(more, obstacle):
    from vtoken.engine.resume import obstacle_of

    assert obstacle_of(sampling(**more)) == obstacle


def test_structured_output_is_an_obstacle():
    from vllm.sampling_params import StructuredOutputsParams

    from vtoken.engine.resume import obstacle_of

    assert obstacle_of(sampling(structured_outputs=StructuredOutputsParams(json={}))) == "structured_outputs"


def test_a_request_with_an_obstacle_is_passed_on_as_it_is(tokenizer):
    ids = tokenizer.encode(TEXTS[0])
    found, progress, engine = generate(
        tokenizer, grouped(ids, []), [1, 2], sampling(presence_penalty=0.5, max_tokens=len(ids))
    )
    assert progress.obstacle == "presence_penalty"
    assert progress.take() is None
    assert len(found) == len(ids)
    assert engine.engine_core.requests[0].prompt_token_ids == [1, 2]


def test_several_prompts_of_one_request_are_an_obstacle(tokenizer):
    from vtoken.engine.resume import ResumableEngine

    async def run():
        resumable = ResumableEngine(scripted(tokenizer, [], [1]), VTokenConfig())
        progress = Progress(Resume(KEY))
        resumable.follow(progress)
        for index in range(2):
            prompt = {"type": "token", "prompt_token_ids": [1]}
            await resumable.generate(prompt, sampling(), f"cmpl-{KEY}-{index}").aclose()
        return progress.obstacle

    assert asyncio.run(run()) == "prompt"


def test_a_stranger_is_not_noted(tokenizer):
    ids = tokenizer.encode(TEXTS[0])
    found, progress, _ = generate(
        tokenizer, grouped(ids, []), [1], sampling(max_tokens=len(ids)), request_id="chatcmpl-" + "f" * 32
    )
    assert len(found) == len(ids)
    assert progress.take() is None
