"""A synchronous engine for comparisons: the same prompts under one configuration, watched step by step.

Used by the demo, the benchmarks and the tests. Scheduler and API share the process, so one `step`
is one engine step and the scheduler's part of the snapshot behind it is exact; the worker is a process of its own, as
always, and what it counts may be STATISTICS_SECONDS old until `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vtoken.core.config import VTokenConfig
from vtoken.core.telemetry import Snapshot
from vtoken.engine.args import engine_args
from vtoken.engine.stats import SnapshotLogger
from vtoken.processes import no_child_left

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt became."""

    text: str
    token_ids: tuple[int, ...]


class OfflineEngine:
    """One vLLM engine without a server; `config=None` is vLLM without vToken.

    Attributes:
        snapshots: where the state after the last step is read.
    """

    def __init__(self, model: str, config: VTokenConfig | None, **engine_kwargs: Any) -> None:
        """Start the engine: seconds, and the memory of its model and cache.

        Raises:
            UnsupportedError, ConfigError: as a message of vLLM's start-up error, from the worker's log.
        """
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        arguments = {"disable_log_stats": False, "enforce_eager": True, **engine_kwargs}
        if config is not None:
            arguments = engine_args(config, **arguments)
        vllm_config = EngineArgs(model=model, **arguments).create_engine_config(UsageContext.LLM_CLASS)
        self.snapshots = SnapshotLogger()
        with no_child_left():  # vLLM leaves the worker running when the engine does not like what it reports
            self._engine = LLMEngine(
                vllm_config, Executor.get_class(vllm_config), log_stats=True, stat_loggers=[self._logger]
            )
        self._count = 0

    def _logger(self, vllm_config: Any, engine_index: int = 0) -> SnapshotLogger:
        return self.snapshots

    # ---- one step at a time ----------------------------------------------------------------------

    def add(self, prompt: Prompt, *, priority: int = 0, lora: Any = None, **sampling: Any) -> str:
        """Enqueue a request; its id. Greedy unless `sampling` says otherwise; `lora` is vLLM's LoRARequest."""
        from vllm import SamplingParams, TokensPrompt

        self._count += 1
        name = f"offline-{self._count}"
        given = prompt if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=prompt)
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        self._engine.add_request(name, given, params, lora_request=lora, priority=priority)
        return name

    def abort(self, names: Sequence[str]) -> None:
        """Stop requests; unknown ids are fine."""
        self._engine.abort_request(list(names))

    def advance(self) -> list[Any]:
        """One engine step; vLLM's own RequestOutputs of the requests that advanced."""
        outputs: list[Any] = self._engine.step()
        return outputs

    def step(self) -> list[tuple[str, Completion, bool]]:
        """One engine step: (id, text so far, finished) of the requests that advanced."""
        return [
            (output.request_id, Completion(output.outputs[0].text, tuple(output.outputs[0].token_ids)), output.finished)
            for output in self.advance()
        ]

    @property
    def busy(self) -> bool:
        """Whether unfinished requests remain."""
        unfinished: bool = self._engine.has_unfinished_requests()
        return unfinished

    def settle(self) -> Snapshot:
        """Let the workers hear of the last ends; the snapshot afterwards."""
        self._engine.step()
        return self.snapshots.snapshot()

    # ---- a whole run -----------------------------------------------------------------------------

    def run(
        self, prompts: Sequence[Prompt], watch: Callable[[Snapshot], None] = lambda snapshot: None, **sampling: Any
    ) -> list[Completion]:
        """Complete all prompts together; `watch` sees the state after every step."""
        names = [self.add(prompt, **sampling) for prompt in prompts]
        done: dict[str, Completion] = {}
        while self.busy:
            done |= {name: completion for name, completion, _ in self.step()}
            watch(self.snapshots.snapshot())
        self.settle()
        return [done[name] for name in names]

    def outputs(self, requests: Sequence[tuple[Prompt, Any, int]]) -> list[Any]:
        """Complete (prompt, SamplingParams, priority) together; vLLM's own RequestOutputs, in that order."""
        from vllm import TokensPrompt

        names = [f"output-{self._count + index}" for index in range(len(requests))]
        self._count += len(requests)
        for name, (prompt, params, priority) in zip(names, requests, strict=True):
            given = prompt if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=prompt)
            self._engine.add_request(name, given, params, priority=priority)
        done: dict[str, Any] = {}
        while self.busy:
            done |= {output.request_id: output for output in self._engine.step()}
        self.settle()
        return [done[name] for name in names]

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """The model's chat template applied to messages, ready for generation."""
        tokenizer = self._engine.get_tokenizer()
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text

    # ---- for tests -------------------------------------------------------------------------------

    def worker(self, method: str) -> Any:
        """Call a method of the worker class, between steps."""
        return self._engine.collective_rpc(method)[0]

    def scheduler(self) -> Any:
        """vLLM's scheduler object."""
        return self._engine.engine_core.engine_core.scheduler

    def close(self) -> None:
        """End the worker process."""
        self._engine.engine_core.shutdown()
