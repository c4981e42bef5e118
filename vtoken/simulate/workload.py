"""Requests to be served: columns of numbers, one entry per request, by time of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vtoken.core.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace.

    Attributes:
        name: where it comes from.
        arrival_s: float64 [N], ascending.
        prompt_tokens, output_tokens: int64 [N], at least 1.
        prefix_at: int64 [N + 1]: the prefix ids of request n are `prefix_ids[prefix_at[n] : prefix_at[n + 1]]`.
        prefix_ids: int64; equal ids at the beginning of two prompts mean equal tokens.
        prefix_span: tokens that one id stands for.
    """

    name: str
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    prefix_at: Ints
    prefix_ids: Ints
    prefix_span: int = 16

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def seconds(self) -> float:
        """Between the first and the last arrival."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def head(self, count: int) -> Workload:
        """The first `count` requests."""
        return self.take(np.arange(min(count, len(self))))

    def take(self, index: Ints) -> Workload:
        """Some requests, in the order of `index`, which keeps arrivals ascending."""
        lengths = np.diff(self.prefix_at)[index]
        starts = self.prefix_at[:-1][index]
        at = np.concatenate(([0], np.cumsum(lengths)))
        where = np.repeat(starts - at[:-1], lengths) + np.arange(at[-1])
        return replace(
            self, arrival_s=self.arrival_s[index], prompt_tokens=self.prompt_tokens[index],
            output_tokens=self.output_tokens[index], prefix_at=at, prefix_ids=self.prefix_ids[where],
        )  # fmt: skip

    def at_rate(self, requests_per_s: float) -> Workload:
        """The same requests, with time stretched to a mean rate."""
        if len(self) < 2 or self.seconds <= 0:
            raise ConfigError("rate", requests_per_s, "a trace of two or more requests at different times")
        wanted = (len(self) - 1) / requests_per_s
        return replace(self, arrival_s=(self.arrival_s - self.arrival_s[0]) * (wanted / self.seconds))

    def repeated(self, count: int) -> Workload:
        """`count` requests: the trace again and again, each round later by its length and a mean gap."""
        rounds, rest = divmod(count, len(self))
        if not rounds:
            return self.head(count)
        period = self.seconds * (1.0 + 1.0 / max(len(self) - 1, 1))
        index = np.concatenate([np.tile(np.arange(len(self)), rounds), np.arange(rest)])
        many = self.take(index)
        return replace(many, arrival_s=many.arrival_s + period * (np.arange(count) // len(self)))

    def with_burst(self, at_s: float, length_s: float, factor: float) -> Workload:
        """Arrivals of `length_s * factor` seconds from `at_s` on come within `length_s`; the others keep their gaps."""
        end = at_s + length_s * factor
        arrival = self.arrival_s
        inside = at_s + (arrival - at_s) / factor
        moved = np.where(arrival < at_s, arrival, np.where(arrival < end, inside, arrival - (end - at_s - length_s)))
        return replace(self, arrival_s=moved)


def workload(
    name: str, arrival_s: Sequence[float] | Floats, prompt: Sequence[int] | Ints, output: Sequence[int] | Ints,
    prefixes: Sequence[Sequence[int]] = (), span: int = 16,
) -> Workload:  # fmt: skip
    """A workload from its columns; requests without a prompt or an output are dropped, the rest sorted by arrival."""
    times, prompts, outputs = np.asarray(arrival_s, float), np.asarray(prompt, np.int64), np.asarray(output, np.int64)
    counts = np.array([len(one) for one in prefixes], np.int64) if len(prefixes) else np.zeros(len(times), np.int64)
    ids = np.array([one for chain in prefixes for one in chain], np.int64)
    whole = Workload(name, times, prompts, outputs, np.concatenate(([0], np.cumsum(counts))), ids, span)
    order = np.argsort(times, kind="stable")
    return whole.take(order[(prompts[order] > 0) & (outputs[order] > 0)])
