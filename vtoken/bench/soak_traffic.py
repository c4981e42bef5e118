"""What a soak sends: requests of every kind, drawn from one seed, and probes whose output is known.

A probe's output depends on its prompt and its own evictions only (float32, greedy, `reader: strict`), so
whatever traffic does to its neighbours, to its blocks or to the prefix cache must not show in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vtoken.bench.prompts import OBJECTS, PLACES, SUBJECTS, VERBS
from vtoken.core.policies import policy_names

PROBE_EVERY = 3
"""Every so many requests a probe is sent."""

CERTAIN_NATS = 0.01
"""A probe's every token leads the next candidate by this much: vLLM's own noise in log-probabilities is 1e-4."""

NOISE_NATS = 2e-3
"""How far the log-probability of a probe's token may lie from the reference."""

Reference = tuple[tuple[int, ...], tuple[float, ...]]
"""Token ids and their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; `probe` is the index of the probe that it repeats, None for the others."""

    prompt: str
    options: dict[str, Any]
    max_tokens: int
    priority: int = 0
    probe: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of vLLM's SamplingParams."""
        probing = {} if self.probe is None else {"logprobs": 2}
        return {"max_tokens": self.max_tokens, "ignore_eos": True, "extra_args": {"vtoken": self.options}, **probing}


class Traffic:
    """An endless seeded sequence of arrivals; the same seed gives the same sequence.

    Attributes:
        choice: the generator that everything random in a soak is drawn from.
    """

    def __init__(self, seed: int, probes: Sequence[Arrival]) -> None:
        self.choice = random.Random(seed)
        self._probes = probes
        self._sent = 0

    def next(self) -> Arrival:
        """The next request: a probe, or a prompt of 10 to 330 tokens of which half begin like others."""
        self._sent += 1
        priority = self.choice.randint(-1, 2)
        if self._probes and self._sent % PROBE_EVERY == 0:
            index = self.choice.randrange(len(self._probes))
            probe = self._probes[index]
            return Arrival(probe.prompt, probe.options, probe.max_tokens, priority, index)
        long = self.choice.random() < 0.4
        own = story(self.choice, self.choice.randint(8, 20) if long else self.choice.randint(1, 4))
        begins = document(self.choice.randrange(4)) if self.choice.random() < 0.5 else ""
        return Arrival(begins + own, any_options(self.choice), self.choice.randint(8, 140), priority)


def probe_options(choice: random.Random, index: int) -> dict[str, Any]:
    """How a probe forgets: often, at decisions that depend on its own tokens alone; one in four not at all."""
    policy = ("random", "streaming_llm", "random", "none")[index % 4]
    return {"policy": policy, **({} if policy == "none" else {**_amounts(choice), "interval_tokens": 4})}


def any_options(choice: random.Random) -> dict[str, Any]:
    """How other requests forget: one in four not at all, the others by any policy, some of them between chunks."""
    policy = choice.choice(policy_names())
    if policy == "none" or choice.random() < 0.2:
        return {"policy": "none"}
    return {"policy": policy, "between_chunks": choice.random() < 0.2, **_amounts(choice)}


def _amounts(choice: random.Random) -> dict[str, Any]:
    return {
        "budget_tokens": choice.choice([32, 48, 80]), "protect_recent": choice.choice([8, 16]),
        "interval_tokens": choice.choice([4, 8, 16]), "seed": choice.randrange(1000),
    }  # fmt: skip


def candidate_probes(count: int) -> list[Arrival]:
    """Probes to choose from: four to twelve sentences, half of them behind a shared beginning."""
    choice = random.Random(-1)
    return [
        Arrival(
            (document(index % 4) if index % 2 else "") + story(choice, choice.randint(4, 12)),
            probe_options(choice, index), max_tokens=40, probe=index,
        )
        for index in range(count)
    ]  # fmt: skip


def document(index: int) -> str:
    """One of the beginnings that requests share: 60 to 130 tokens."""
    return story(random.Random(index), 6 + 2 * index)


def story(choice: random.Random, sentences: int) -> str:
    """Sentences of about thirteen tokens."""
    kinds = (SUBJECTS, VERBS, OBJECTS, PLACES)
    return "".join(" ".join(choice.choice(kind) for kind in kinds).capitalize() + ". " for _ in range(sentences))


def certain(output: Any) -> bool:
    """Whether every token of a finished output (with `logprobs=2`) leads the next candidate by CERTAIN_NATS."""
    ranked = [sorted((entry.logprob for entry in at.values()), reverse=True) for at in output.outputs[0].logprobs]
    return all(first - second >= CERTAIN_NATS for first, second, *_ in ranked)


def reference(output: Any) -> Reference:
    """What a finished probe said."""
    ids = tuple(output.outputs[0].token_ids)
    return ids, tuple(at[token].logprob for token, at in zip(ids, output.outputs[0].logprobs, strict=True))


def equal(found: Reference, expected: Reference) -> bool:
    """The same tokens, with the same log-probabilities up to vLLM's own noise."""
    return found[0] == expected[0] and all(
        abs(one - other) <= NOISE_NATS for one, other in zip(found[1], expected[1], strict=True)
    )
