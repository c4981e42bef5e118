"""Two engines in one process that share their weights: what differs is vToken alone.

Two processes of one and the same program differ by per cents for as long as they live: where the weights lie in
memory decides what the processor's caches keep. More repeats in the same two processes do not help. So both engines
are in one process here, read the same weights at the same addresses, and take turns step by step.

vLLM keeps the connector of a process in a module variable. It is taken away while the unmodified engine works.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vtoken.bench.stepper import Cost, Stepper, prompts


@dataclass(frozen=True, slots=True)
class Pair:
    """What the same requests cost in both engines, and whether their outputs are identical."""

    ours: Cost
    native: Cost
    identical: bool


class Twins:
    """An engine with `config`, and one of unmodified vLLM."""

    def __init__(self, model: str, config: Mapping[str, Any] | None, engine_kwargs: Mapping[str, Any]) -> None:
        """`config=None` compares unmodified vLLM with itself: what that finds is the error of the measurement."""
        self._native = Stepper(model, None, engine_kwargs)  # first: vToken registers its backend for the process
        self._ours = Stepper(model, config, engine_kwargs)
        _share_weights(_model(self._native), _model(self._ours))

    def run(self, concurrency: int, prompt_tokens: int, tokens: int) -> Pair:
        """The same requests in both, from their admission to their end."""
        given = prompts(concurrency, prompt_tokens)
        ours, native = self._ours.add(given, tokens), self._native.add(given, tokens)
        ours_first = True
        while ours.busy or native.busy:
            if ours_first:
                ours += self._ours.advance(1)
            with _without_connector():
                native += self._native.advance(1)
            if not ours_first:
                ours += self._ours.advance(1)
            ours_first = not ours_first  # each finds the processor's caches as often as it left them itself
        return Pair(ours, native, self._ours.outputs() == self._native.outputs())


def _model(stepper: Stepper) -> Any:
    """The torch module of an engine whose worker is in this process."""
    executor = stepper.engine._engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner.model


def _share_weights(source: Any, target: Any) -> None:
    originals = dict(source.named_modules())
    for name, module in target.named_modules():
        original = originals[name]
        for key, tensor in (*original.named_parameters(recurse=False), *original.named_buffers(recurse=False)):
            getattr(module, key).data = tensor.data
        if hasattr(original, "cpu_linear"):  # holds the weight in the order of the CPU kernel
            module.cpu_linear = original.cpu_linear


@contextmanager
def _without_connector() -> Iterator[None]:
    # By name: only vtoken.engine imports vLLM, and only here two engines share a process.
    state: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_transfer_state")
    connector, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        state._KV_CONNECTOR_AGENT = connector
