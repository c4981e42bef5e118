"""One engine behind a small surface: vLLM's AsyncLLM and vLLM's own OpenAI layer, in this process.

Nothing is formatted here: what clients see is what `vllm serve` would send. What is added: the `vtoken` options of
a request (validated, then carried as `SamplingParams.extra_args["vtoken"]`), errors as values, an abort that
does not depend on when Python collects an abandoned generator, and going on with what another engine has begun.

    body -> vtoken options -> request model -> vLLM's serving layer -> AsyncLLM -> engine core process
                 |400               |400              |400/404/...
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import State
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from vtoken.core.config import VTokenConfig, parse_request_options
from vtoken.core.errors import ConfigError, EngineLost, RequestOptionError
from vtoken.core.policies import policy_names
from vtoken.core.replies import ErrorReply, replica_lost
from vtoken.core.telemetry import Details, Snapshot
from vtoken.core.transcript import Progress
from vtoken.engine.args import engine_args
from vtoken.engine.refusals import ERROR_EVENT, engine_reply, error_event_reply, validation_reply
from vtoken.engine.resume import ResumableEngine
from vtoken.engine.stats import SnapshotLogger

logger = logging.getLogger(__name__)

SEED_ALLOWED = "null while engine.enable_chunked_prefill is on: this engine dies of it on a CPU"
"""vLLM 0.32 rewinds the request's generator after each chunk, which torch's CPU generator can't do."""

XARG = "vtoken"
"""Where a request's options travel: `vllm_xargs` on the way in, `SamplingParams.extra_args` in the engine."""

Result = dict[str, Any] | AsyncIterator[str] | ErrorReply
"""What a request comes to: a whole response, server-sent events as text, or a refusal."""


class EngineService:
    """Owner of one AsyncLLM. Use `start`; all methods run on the event loop that `start` ran on."""

    def __init__(
        self, engine: ResumableEngine, state: State, config: VTokenConfig, stats: list[SnapshotLogger]
    ) -> None:
        self._engine, self._state, self._config, self._stats = engine, state, config, stats

    @classmethod
    async def start(
        cls, model: str, served_name: str, config: VTokenConfig, engine_kwargs: Mapping[str, Any]
    ) -> EngineService:
        """Load the model and start the engine processes (seconds to minutes).

        Args:
            model: directory or hub name.
            served_name: the name that requests use.
            config: of vToken; decides connector, worker class and reader.
            engine_kwargs: arguments of AsyncEngineArgs on top.

        Raises:
            VTokenError: settings that vToken refuses.
            Exception: whatever the engine raises when it cannot start; no process is left behind.
        """
        if config.policy.policy not in policy_names():
            raise ConfigError("vtoken.policy.policy", config.policy.policy, "one of " + ", ".join(policy_names()))
        arguments = engine_args(config, **{**engine_kwargs, "model": model, "served_model_name": [served_name]})
        vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
        stats: list[SnapshotLogger] = []

        def new_logger(vllm_config: Any, engine_index: int = 0) -> SnapshotLogger:
            stats.append(SnapshotLogger(vllm_config, engine_index))
            return stats[-1]

        engine = ResumableEngine(AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[new_logger]), config)
        try:
            state = await _openai_state(engine, model, served_name)
        except BaseException:
            engine.shutdown()
            raise
        return cls(engine, state, config, stats)

    async def chat(self, body: dict[str, Any], progress: Progress) -> Result:
        """Serve an OpenAI chat completion. Changes nothing when it answers an ErrorReply.

        Cancelling the caller, or closing the returned iterator early, aborts the request in the engine. An engine
        that ends under a stream ends the iterator with EngineLost.

        Args:
            body: the request.
            progress: where the request begins, and what is noted of its tokens; before a chunk of a stream is
                given out, `progress` holds the tokens behind it.
        """
        handler = self._state.openai_serving_chat
        return await self._run(ChatCompletionRequest, handler.create_chat_completion, "chatcmpl-", body, progress)

    async def completion(self, body: dict[str, Any], progress: Progress) -> Result:
        """Serve an OpenAI completion; see `chat`."""
        handler = self._state.openai_serving_completion
        return await self._run(CompletionRequest, handler.create_completion, "cmpl-", body, progress)

    def look(self, progress: Progress) -> None:
        """Bring `progress` of a unary request up to date."""
        self._engine.look(progress)

    async def models(self) -> dict[str, Any]:
        """The served model as OpenAI's list object."""
        listing = await self._state.openai_serving_models.show_available_models()
        cards = listing.model_dump()
        for card in cards["data"]:
            card["root"] = card["id"]  # the directory on the server is nobody's business
        return cards  # type: ignore[no-any-return]

    def snapshot(self) -> Snapshot:
        """The engine's last report; before its first step, an empty pool of the size that it announced."""
        last = self._stats[0].snapshot() if self._stats else Snapshot()
        if last.capacity_blocks:
            return last
        cache = self._engine.vllm_config.cache_config
        usable = max(0, (cache.num_gpu_blocks or 0) - 1)  # less vLLM's null block
        return replace(last, block_size_tokens=cache.block_size, capacity_blocks=usable, free_blocks=usable)

    def details(self) -> Details:
        """What the engine counts for metrics only; up to DETAIL_SECONDS older than the snapshot."""
        return self._stats[0].details() if self._stats else {}

    async def explain(self, request_id: str) -> dict[str, list[dict[str, Any]]]:
        """What the engine's worker has decided about a request, and why; the engine ends its step first.

        Args:
            request_id: `id` of an answer, or the engine's own id from a log.

        Returns:
            Engine id -> entries of vtoken.core.history as mappings, oldest first; several prompts, or n > 1, are
            several engine requests. Empty if nothing is on record.

        Raises:
            EngineDeadError: the engine has ended. If it ends during the call, vLLM never answers: set a time limit.
        """
        workers = await self._engine.collective_rpc("vtoken_explain", args=(request_id,))
        return workers[0]  # type: ignore[no-any-return]  # the workers of one engine decide alike

    async def check_health(self) -> None:
        """Fails when the engine loop is dead; a busy engine is healthy.

        Raises:
            EngineDeadError: the engine process or its output loop has ended.
        """
        await self._engine.check_health()

    async def shutdown(self) -> None:
        """End the engine processes; running requests are lost. May be called twice."""
        self._engine.shutdown()

    async def _run(
        self, model: Any, create: Callable[..., Any], prefix: str, body: dict[str, Any], progress: Progress
    ) -> Result:
        request_id = progress.resume.request_id
        self._engine.follow(progress)
        try:
            request = model.model_validate(self._engine_body(body, request_id))
        except RequestOptionError as error:
            return ErrorReply(400, str(error), error.key, "invalid_vtoken_option")
        except ValidationError as error:
            return validation_reply(error)
        except Exception as error:  # noqa: BLE001  # vLLM's validators raise their own; it maps them itself
            return engine_reply(create_error_response(error))
        result = await self._create(create, request, prefix + request_id, progress)
        if isinstance(result, ErrorReply) and result.status >= 500 and self._engine.errored:
            return replica_lost()
        return result

    async def _create(self, create: Callable[..., Any], request: Any, engine_id: str, progress: Progress) -> Result:
        try:
            result = await create(request)
            _raise_if_cancelled()
            if isinstance(result, ErrorResponse):
                return engine_reply(result)
            if not hasattr(result, "__anext__"):
                return result.model_dump()  # type: ignore[no-any-return]
            return await self._checked_stream(result, engine_id, progress)
        except Exception as error:  # noqa: BLE001  # as in vLLM's own handlers: every failure is an answer
            await self._abort(engine_id, progress)
            return engine_reply(create_error_response(error))
        except BaseException:
            await self._abort(engine_id, progress)
            raise

    async def _checked_stream(self, events: AsyncGenerator[str, None], engine_id: str, progress: Progress) -> Result:
        """The stream, once its first event is there: a refusal that vLLM finds late is still an HTTP error."""
        try:
            first = await anext(events)
        except StopAsyncIteration:
            return ErrorReply(500, "The engine answered with an empty stream.", code="engine")
        reply = error_event_reply(first)
        if reply is not None:
            await events.aclose()
            return reply
        return self._stream(first, events, engine_id, progress)

    async def _stream(
        self, first: str, events: AsyncGenerator[str, None], engine_id: str, progress: Progress
    ) -> AsyncIterator[str]:
        ended = False
        try:
            yield first
            async for event in events:
                if event.startswith(ERROR_EVENT) and self._engine.errored:
                    ended = True  # there is nothing left to abort
                    raise EngineLost
                yield event
            ended = True
        finally:
            if not ended:
                await self._abort(engine_id, progress)
                with contextlib.suppress(RuntimeError):
                    await events.aclose()

    async def _abort(self, engine_id: str, progress: Progress) -> None:
        """Abort every engine request made for an HTTP request (a list of prompts makes several).

        An attempt that ends late leaves alone what a later one, under the same id, has begun here.
        """
        if not self._engine.follows(progress):
            return
        ids = [key for key in self._external_ids() if key == engine_id or key.startswith(engine_id + "-")]
        if ids:
            await self._engine.abort(ids)

    def _external_ids(self) -> list[str]:
        return list(self._engine.output_processor.external_req_ids)

    def _chunks_on_cpu(self) -> bool:
        chunked: bool = self._engine.vllm_config.scheduler_config.enable_chunked_prefill
        return chunked and current_platform.is_cpu()

    def _engine_body(self, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        """The body as vLLM takes it; `body` itself stays as it is.

        Raises:
            RequestOptionError: the `vtoken` options are wrong.
        """
        ours = dict(body)
        options = parse_request_options(ours.pop("vtoken", None), self._config.policy)
        if options.policy not in policy_names():
            raise RequestOptionError("vtoken.policy", options.policy, "one of " + ", ".join(policy_names()))
        if ours.get("seed") is not None and self._chunks_on_cpu():
            raise RequestOptionError("seed", ours["seed"], SEED_ALLOWED)
        xargs = ours.get("vllm_xargs")
        if isinstance(xargs, Mapping) and XARG in xargs:
            raise RequestOptionError(f"vllm_xargs.{XARG}", "...", "nothing: put the options into `vtoken`")
        if body.get("vtoken") is not None:
            extra = dict(xargs) if isinstance(xargs, Mapping) else {}
            ours["vllm_xargs"] = {**extra, XARG: json.dumps(asdict(options))}
        ours["request_id"] = request_id
        return ours


async def _openai_state(engine: AsyncLLM, model: str, served_name: str) -> State:
    """The serving objects, made by vLLM's own function from its own defaults."""
    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", model, "--served-model-name", served_name])
    state = State()
    await init_app_state(engine, state, arguments, await engine.get_supported_tasks())
    return state


def _raise_if_cancelled() -> None:
    """Undo what vLLM's unary path does: it turns a cancellation into an error response."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
