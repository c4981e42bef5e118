"""Generation that another engine has begun: vLLM's own output side is given the tokens as if just made.

A resumed request stands twice in vLLM. Its output side (detokenizer, stop strings, output kind, usage) holds the
request as the client sent it and is fed the known tokens in the groups in which they were made once. The engine core
gets prompt and known tokens as one prompt, and owes the rest. So every text, cut, stop string or multi-byte character
across the seam is vLLM's own work, and the serving layer above notices nothing.

        AsyncLLM.generate ─► add_request ─► output processor ◄── known groups, one by one   (Replay)
                                  │
                                  └───────► engine core      ◄── prompt + known tokens, when they are used up
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from copy import copy
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from vtoken.core.config import MAX_TOKENS, OPTIONS_KEY, VTokenConfig
from vtoken.core.transcript import Finish, Progress
from vtoken.engine.requests import options_of

HARMLESS = frozenset({
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind", "stream_interval",
    "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache", "watermarking",
    "_eos_token_id", "_all_stop_token_ids", "_watermarking_skipped",
})  # fmt: skip
"""Sampling parameters whose effect does not depend on which tokens are prompt and which are output, or that the
continuation is given anew. Whatever else is set (or is new in vLLM) counts as an obstacle."""


def obstacle_of(params: SamplingParams) -> str | None:
    """The field for which prompt and known tokens as one prompt would not go on as the request does, or None."""
    usual = SamplingParams()
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if name in HARMLESS or _is_usual(value, getattr(usual, name)):
            continue
        if name == "seed" and params.temperature == 0.0:
            continue
        if name == "extra_args" and value.keys() <= {OPTIONS_KEY}:
            continue
        return str(name).strip("_")
    return None


def _is_usual(value: Any, usual: Any) -> bool:
    if usual is None:
        return value is None or (isinstance(value, list | dict | set | str) and not value)
    return bool(value == usual)


class ResumableEngine:
    """An AsyncLLM that notes what it generates, and goes on with what another one has begun.

    Everything but `generate` is the engine's own. Owner of the progress of the requests that `follow` was told.

    Args:
        engine: the engine.
        config: of vToken; says which requests are left alone.
    """

    def __init__(self, engine: AsyncLLM, config: VTokenConfig) -> None:
        self._engine, self._config = engine, config
        self._followed: WeakValueDictionary[str, Progress] = WeakValueDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def follow(self, progress: Progress) -> None:
        """Note what is generated for this request, while somebody holds `progress`."""
        self._followed[progress.resume.request_id] = progress

    def follows(self, progress: Progress) -> bool:
        """Whether this is the last attempt at its request here."""
        return self._followed.get(progress.resume.request_id) is progress

    def look(self, progress: Progress) -> None:
        """Note how far a unary request has come; nothing else asks for its tokens before it ends."""
        if progress.obstacle is not None or not progress.engine_ids:
            return
        processor = self._engine.output_processor
        for name in processor.external_req_ids.get(progress.engine_ids[0], ()):
            state = processor.request_states[name]
            new = state.detokenizer.output_token_ids[progress.tokens :]
            if new and state.output_kind is RequestOutputKind.FINAL_ONLY:
                progress.add(new)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **more: Any
    ) -> AsyncIterator[Any]:
        """As AsyncLLM.generate."""
        progress = self._followed.get(_digits(request_id))
        if progress is None:
            return self._engine.generate(prompt, sampling_params, request_id, **more)  # type: ignore[no-any-return]
        progress.engine_ids.append(request_id)
        if len(progress.engine_ids) > 1 or prompt.get("type") != "token":
            progress.obstacle = "prompt"  # several, or none that is tokens
        progress.obstacle = progress.obstacle or obstacle_of(sampling_params)
        source = self._engine
        if progress.obstacle is None and (progress.tokens or progress.resume.finish):
            source = Resumption(self._engine, progress, self._config)
        outputs = AsyncLLM.generate(source, prompt, sampling_params, request_id, **more)
        if progress.obstacle is not None or sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
            return outputs  # type: ignore[no-any-return]
        return _noted(outputs, progress)


async def _noted(outputs: Any, progress: Progress) -> AsyncIterator[Any]:
    """The outputs, after their tokens are noted; what was known already is not noted again."""
    known = len(progress.resume.groups)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            (completion,) = output.outputs
            if known:
                known -= 1
            elif completion.finish_reason != "abort":
                reason = completion.finish_reason
                progress.add(completion.token_ids, None if reason is None else (reason, completion.stop_reason))
            yield output


def _digits(request_id: str) -> str:
    """`cmpl-0123...-0` -> the 32 digits."""
    return request_id.partition("-")[2][:32]


class Resumption:
    """An engine during one call of `AsyncLLM.generate`, which begins with known tokens.

    vLLM's own `generate` and `add_request` run on it; it only parts what `add_request` gives to the output side
    from what the engine core gets.
    """

    def __init__(self, engine: AsyncLLM, progress: Progress, config: VTokenConfig) -> None:
        self._engine, self._progress, self._config = engine, progress, config
        self._request: EngineCoreRequest | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def engine_core(self) -> Resumption:
        """Where `_add_request` sends the request: here, and not yet to the core."""
        return self

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """As of vLLM's client of the engine core."""
        self._request = request

    async def _add_request(self, *arguments: Any) -> None:
        await AsyncLLM._add_request(self, *arguments)

    async def add_request(self, *arguments: Any, **more: Any) -> Replay:
        """As AsyncLLM.add_request; what it returns gives the known groups first."""
        queue = await AsyncLLM.add_request(self, *arguments, **more)
        assert self._request is not None
        return Replay(self._engine, queue, self._request, self._progress, self._config)


class Replay:
    """Stands for vLLM's RequestOutputCollector: first the outputs of the known groups, then those to come."""

    def __init__(
        self,
        engine: AsyncLLM,
        queue: RequestOutputCollector,
        request: EngineCoreRequest,
        progress: Progress,
        config: VTokenConfig,
    ) -> None:
        self._engine, self._queue, self._request, self._config = engine, queue, request, config
        self._known = progress.resume.groups.ids
        self._steps = self._step_by_step(progress)
        self._begun = False
        self.request_id = queue.request_id

    def get_nowait(self) -> Any:
        """The output of the next known group that makes one; afterwards what vLLM's queue holds."""
        for _ in self._steps:
            output = self._queue.get_nowait()
            if output is not None:
                return output
        return self._queue.get_nowait()

    async def get(self) -> Any:
        """The next output of the engine; the first call sends it the rest of the request."""
        if not self._begun:
            self._begun = True
            state = self._engine.output_processor.request_states.get(self.request_id)
            if state is not None:  # aborted meanwhile otherwise
                state.is_prefilling = True
                await self._engine.engine_core.add_request_async(continuation(self._request, self._known, self._config))
        return await self._queue.get()

    def close(self) -> None:
        """As of vLLM's queue."""
        self._queue.close()

    def _step_by_step(self, progress: Progress) -> Iterator[None]:
        """Give vLLM's output side one group after another, as the engine core would."""
        resume, left = progress.resume, len(progress.resume.groups)
        for group in resume.groups:
            left -= 1
            finish = None if left else self._finish(resume.finish)
            output = EngineCoreOutput(self.request_id, group)
            if finish is not None:
                output.finish_reason, output.stop_reason = FINISH_REASONS[finish[0]], finish[1]
            self._engine.output_processor.process_outputs([output])
            yield

    def _finish(self, finish: Finish | None) -> Finish | None:
        """Why the request ends with the last known group, as far as the detokenizer does not find out itself."""
        if finish is not None:
            return None if isinstance(finish[1], str) else finish
        limit = self._request.sampling_params.max_tokens
        return ("length", None) if limit is not None and len(self._known) >= limit else None


FINISH_REASONS = {str(reason): reason for reason in FinishReason}


def continuation(request: EngineCoreRequest, known: list[int], config: VTokenConfig) -> EngineCoreRequest:
    """The request for an engine core that is to go on after the known tokens.

    Args:
        request: as the client sent it; stays as it is.
        known: generated token ids.
        config: of vToken: a prompt that its policy leaves alone is left alone with the known tokens too.
    """
    rest = copy(request)
    params = request.sampling_params.clone()
    prompt = list(request.prompt_token_ids)
    if params.max_tokens is not None:
        params.max_tokens -= len(known)
    params.min_tokens = max(0, params.min_tokens - len(known))
    options, _ = options_of(params, config)
    if options.evicts and not options.evicts_from(len(prompt)):
        kept = {**asdict(options), "min_prompt_tokens": MAX_TOKENS}
        params.extra_args = {**(params.extra_args or {}), OPTIONS_KEY: json.dumps(kept)}
    rest.prompt_token_ids, rest.sampling_params = prompt + known, params
    return rest
