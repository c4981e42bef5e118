"""What an engine did with its requests, step by step: what it generated, found likely, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vtoken.bench.prompts import Request
from vtoken.core.config import PolicyOptions
from vtoken.engine.offline import Completion, OfflineEngine

TOP = 20
"""Log-probabilities compared per step, the engine's largest: vLLM's default limit."""


@dataclass(slots=True)
class Trace:
    """What the engine did with one request.

    Attributes:
        generated: token ids, one per step.
        top: per step, log-probabilities by token id.
        live: per step, the live token ids in the worker's table.
    """

    request: Request
    generated: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    live: list[list[int]] = field(default_factory=list)

    @property
    def options(self) -> PolicyOptions:
        """The request's effective options, in an engine that has no policy by itself."""
        return PolicyOptions().override(self.request.options)


class TracedEngine(OfflineEngine):
    """An OfflineEngine for requests with options of their own, whose steps can be traced.

    Attributes:
        most_running: requests that ran in one step.
    """

    most_running = 0

    def complete(self, requests: Sequence[Request], *, plain: bool = False) -> list[Completion]:
        """Complete all requests together; `plain`: without vToken's options."""
        names = [self.add(request.prompt, **request.sampling(plain=plain)) for request in requests]
        done: dict[str, Completion] = {}
        while self.busy:
            done |= {name: completion for name, completion, _ in self.step()}
            self._look()
        self.settle()
        return [done[name] for name in names]

    def trace(self, requests: Sequence[Request]) -> list[Trace]:
        """Complete all requests together, and look into the worker after every step."""
        traces = {
            self.add(request.prompt, logprobs=TOP, detokenize=False, **request.sampling()): Trace(request)
            for request in requests
        }
        while self.busy:
            outputs = self.advance()
            # The worker knows a request by its id and vLLM's suffix.
            rows = {name.rpartition("-")[0]: row for name, row in self.worker("vtoken_rows").items()}
            for output in outputs:
                trace, completion = traces[output.request_id], output.outputs[0]
                trace.generated = list(completion.token_ids)
                trace.top.append({token: entry.logprob for token, entry in completion.logprobs[-1].items()})
                trace.live.append(rows[output.request_id]["live"])
            self._look()
        self.settle()
        return list(traces.values())

    def _look(self) -> None:
        self.most_running = max(self.most_running, self.snapshots.snapshot().running_requests)
