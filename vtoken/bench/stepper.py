"""Engines that are measured side by side, driven a few steps at a time.

Scheduler and worker share one process and one thread (vLLM's `uni` executor). In vLLM's usual two processes
each side waits for the other in a busy loop, so their CPU seconds would be waiting; here every CPU second is
work, of the scheduler, the worker and all of vToken. The messages between the two processes are what this
leaves out.

Stepping turn by turn makes the pairs tight: the n-th steps of two engines are a fraction of a second apart,
with the same requests at the same lengths.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtoken.bench.child import Child
from vtoken.core.config import VTokenConfig
from vtoken.core.telemetry import Snapshot

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM on the CPU replaces the `uni` executor
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages for torch: where weights happen to lie matters less
}
PRELOAD = ("vtoken.engine.connector", "vllm.v1.engine.llm_engine")  # not the worker: vLLM must load it itself

BLOCK_SIZE = 32
"""For every engine of a comparison: unmodified vLLM takes multiples of 32 only."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What some engine steps cost.

    Attributes:
        steps, tokens: engine steps, and tokens generated in them.
        wall_s, cpu_s: time, and CPU time of the process (all its threads).
        substrate_s: what vToken itself has counted, on the worker's step path.
        busy: whether requests are left.
    """

    steps: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    substrate_s: float = 0.0
    busy: bool = True

    def __add__(self, later: Cost) -> Cost:
        return Cost(
            self.steps + later.steps,
            self.tokens + later.tokens,
            self.wall_s + later.wall_s,
            self.cpu_s + later.cpu_s,
            self.substrate_s + later.substrate_s,
            later.busy,
        )


class Stepper:
    """One engine whose scheduler and worker are in this process; its methods say what they cost.

    Attributes:
        engine: the engine itself.
    """

    def __init__(self, model: str, config: Mapping[str, Any] | None, engine_kwargs: Mapping[str, Any]) -> None:
        """`config=None` is vLLM without vToken."""
        from vtoken.engine.offline import OfflineEngine

        settings = None if config is None else VTokenConfig.from_mapping(config)
        self.engine = OfflineEngine(
            model, settings, block_size=BLOCK_SIZE, distributed_executor_backend="uni",
            enable_prefix_caching=False, **engine_kwargs,
        )  # fmt: skip
        self._outputs: dict[str, tuple[int, ...]] = {}

    def add(self, prompts: Sequence[list[int]], tokens: int, **sampling: Any) -> Cost:
        """Enqueue prompts, each to be continued by exactly `tokens` tokens; forgets the outputs before."""
        self._outputs = {}

        def work() -> int:
            for prompt in prompts:
                self._outputs[self.engine.add(prompt, max_tokens=tokens, ignore_eos=True, **sampling)] = ()
            return 0

        return self._cost(work)

    def prefill(self) -> Cost:
        """Step until every request has its first token."""

        def work() -> int:
            steps = 0
            while not all(self._outputs.values()):
                self._step()
                steps += 1
            return steps

        return self._cost(work)

    def advance(self, steps: int) -> Cost:
        """At most so many steps; once all requests are complete, the workers hear of it, too."""

        def work() -> int:
            done = 0
            while done < steps and self.engine.busy:
                self._step()
                done += 1
            if not self.engine.busy:
                self.engine.settle()
            return done

        return self._cost(work)

    def outputs(self) -> list[tuple[int, ...]]:
        """Token ids generated so far, by request."""
        return list(self._outputs.values())

    def _step(self) -> None:
        self._outputs |= {name: completion.token_ids for name, completion, _ in self.engine.step()}

    def _generated(self) -> int:
        return sum(map(len, self._outputs.values()))

    def _cost(self, work: Callable[[], int]) -> Cost:
        tokens, substrate_s = self._generated(), self._substrate_s()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        steps = work()
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        return Cost(
            steps, self._generated() - tokens, wall_s, cpu_s, self._substrate_s() - substrate_s, self.engine.busy
        )

    def _substrate_s(self) -> float:
        snapshot: Snapshot = self.engine.snapshots.snapshot()
        return snapshot.substrate_seconds_total


def in_process(factory: Callable[..., Any], *arguments: Any) -> Child:
    """A process that can hold an engine. Changes this process's environment, which the other one inherits."""
    os.environ.update(ENVIRONMENT)
    return Child(factory, *arguments, preload=PRELOAD)


def advance_in_turn(engines: Sequence[Child], steps: int) -> list[Cost]:
    """Let each engine do `steps` steps, one engine after the other."""
    return [engine.call("advance", steps) for engine in engines]


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Different prompts of an exact length, from ids that every vocabulary of today has."""
    return [[100 + (7919 * i + 104_729 * row) % 20_000 for i in range(tokens)] for row in range(count)]
