"""Two engines in one process that share their weights: what differs is vToken alone.

Two processes of one and the same program differ by per cents for as long as they live: where the weights lie in
memory decides what the processor's caches keep. More repeats in the same two processes do not help. So both engines
are in one process here, read the same weights at the same addresses, and take turns step by step.

What remains of the kind is the rest of their memory, of which the engine that started first has the better half or the
worse. So starts come in twos, one in each order, and what the two measured is added up.

vLLM keeps the connector and the attention backend of a process in module variables. The connector is taken away while
the unmodified engine works, the backend before it starts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vtoken.bench.stepper import Cost, Stepper, prompts


@dataclass(frozen=True, slots=True)
class Pair:
    """What the same requests cost in both engines, and whether their outputs are identical."""

    ours: Cost
    native: Cost
    identical: bool

    def __add__(self, other: Pair) -> Pair:
        return Pair(self.ours + other.ours, self.native + other.native, self.identical and other.identical)


class Subject(StrEnum):
    """What is compared with unmodified vLLM."""

    VTOKEN = "vtoken"
    CONNECTOR = "connector"
    """vLLM with a connector that does nothing: what vLLM itself pays for having one."""
    CONTROL = "control"
    """Unmodified vLLM: what that finds is the error of the measurement."""


class Twins:
    """An engine of the subject, and one of unmodified vLLM."""

    def __init__(self, model: str, subject: Subject, engine_kwargs: Mapping[str, Any], *, native_first: bool) -> None:
        if native_first:
            self._native = _unmodified(model, engine_kwargs)
        config: dict[str, Any] | None = {} if subject is Subject.VTOKEN else None
        connector = {"kv_transfer_config": _null_connector()} if subject is Subject.CONNECTOR else {}
        self._ours = Stepper(model, config, {**engine_kwargs, **connector})
        if not native_first:
            self._native = _unmodified(model, engine_kwargs)
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


def _unmodified(model: str, engine_kwargs: Mapping[str, Any]) -> Stepper:
    """Unmodified vLLM, whatever has been started in this process before."""
    _vllm("v1.attention.backends.registry").AttentionBackendEnum.CPU_ATTN.clear_override()
    _vllm("v1.attention.selector")._cached_get_attn_backend.cache_clear()
    # The worker looks for kernels in all modules, and llvmlite's functions, which vToken loads, don't bear that.
    functions = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        with _without_connector():
            return Stepper(model, None, engine_kwargs)
    finally:
        if functions is not None:
            sys.modules["llvmlite.binding.ffi"] = functions


def _null_connector() -> Any:
    config = _vllm("config").KVTransferConfig
    module = "vtoken.bench.null_connector"
    return config(kv_connector="NullConnector", kv_role="kv_both", kv_connector_module_path=module)


def _vllm(module: str) -> Any:
    # By name: only vtoken.engine imports vLLM, and only here two engines share a process.
    return importlib.import_module(f"vllm.{module}")


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
    state = _vllm("distributed.kv_transfer.kv_transfer_state")
    connector, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        state._KV_CONNECTOR_AGENT = connector
