"""Routers of a simulated fleet. All but two are the fleet's own (`vtoken.core.desk`), one Desk per ingress.

ours               effective room, affinity, trust; behind the gate, as it is deployed
ours_ungated       the same without the gate
round_robin, power_of_two, least_outstanding, least_kv   modes of the same Desk, fed by the same reports
..._gated          one of these behind the same gate
prefix_affinity    a prompt's first prefix id names its replica, unless that one has too much to do
oracle             knows every length in advance and every ending at once
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from vtoken.core.affinity import BYTES_PER_TOKEN, prefix_chain
from vtoken.core.columns import FleetColumns
from vtoken.core.config import PolicyOptions
from vtoken.core.desk import Desk
from vtoken.core.errors import ConfigError
from vtoken.core.routing import Mode, RouteHint, RoutingTunables
from vtoken.simulate.workload import Workload

MODES = {"ours": Mode.ROOM, **{mode.value: mode for mode in Mode if mode is not Mode.ROOM}}
OTHERS = (*(name for name in MODES if name != "ours"), "prefix_affinity")
"""What our router is compared with."""

GATED, UNGATED = "_gated", "_ungated"
ROUTERS = ("ours", "ours_ungated", *OTHERS, "oracle", *(name + GATED for name in ("power_of_two", "least_kv")))

OVERLOAD = 1.25
"""Prefix affinity leaves its replica when that has this many times the mean of requests in flight, and one more."""


class Router(Protocol):
    """One ingress's router. Replicas are numbers."""

    def choose(self, request: int, now_s: float, replicas: Sequence[int]) -> int:
        """The replica for a request, one of those that live; the request is charged to it."""
        ...

    def ended(self, request: int, replica: int, now_s: float) -> None:
        """A request that was sent to a replica has its whole answer."""
        ...

    def failed(self, request: int, replica: int, now_s: float) -> None:
        """A replica died, or was dead, with the request."""
        ...

    def look(self, view: FleetColumns, asked_s: float) -> None:
        """A view of the fleet."""
        ...


@dataclass(frozen=True, slots=True)
class Scene:
    """What routers may know about the traffic.

    Attributes:
        work: the trace. Lengths of answers are for the oracle only.
        blocks: of each replica. block_size: tokens of one.
        options: the policy of every request.
        slowness: factor of each replica's step times.
    """

    work: Workload
    blocks: Sequence[int]
    block_size: int = 16
    options: PolicyOptions = field(default_factory=PolicyOptions)
    slowness: Sequence[float] = ()


def names_of(count: int) -> tuple[str, ...]:
    """Replica ids as the core wants them."""
    return tuple(f"replica-{number:04d}" for number in range(count))


def make(name: str, scene: Scene, seed: int) -> Router:
    """A router by name.

    Raises:
        ConfigError: no router has that name.
    """
    rule = name.removesuffix(GATED).removesuffix(UNGATED)
    if rule in MODES:
        return DeskRouter(scene, MODES[rule], seed)
    if rule == "prefix_affinity":
        return PrefixAffinity(scene)
    if rule == "oracle":
        return Oracle(scene)
    raise ConfigError("router", name, "one of " + ", ".join(ROUTERS))


def gated(name: str) -> bool:
    """Whether requests come to the routers of that name through gates."""
    return name == "ours" or name.endswith(GATED)


def tunables_of(scene: Scene, mode: Mode) -> RoutingTunables:
    """The defaults, and the mean length of answers, as an operator would find it out."""
    work = scene.work
    expected = round(float(work.output_tokens.mean()))
    demand = round(float((work.prompt_tokens + work.output_tokens).mean()))
    return RoutingTunables(mode.value, expected_output_tokens=expected, typical_demand_tokens=demand)


def hint_of(scene: Scene, request: int, expected_output_tokens: int) -> RouteHint:
    """What an ingress would know of a request, its beginning apart."""
    prompt, options = int(scene.work.prompt_tokens[request]), scene.options
    budget = options.target_tokens(prompt + expected_output_tokens) if options.evicts else None
    return RouteHint(prompt, 0, budget)


class DeskRouter:
    """What an ingress really runs."""

    def __init__(self, scene: Scene, mode: Mode, seed: int) -> None:
        tunables = tunables_of(scene, mode)
        self.desk = Desk(tunables, random.Random(seed))
        self._scene, self._expected = scene, tunables.expected_output_tokens
        self._names = names_of(len(scene.blocks))
        self._candidates: tuple[Sequence[int], tuple[str, ...]] = ((), ())
        self._sent_s: dict[int, float] = {}

    def choose(self, request: int, now_s: float, replicas: Sequence[int]) -> int:
        """See Router."""
        if self._candidates[0] is not replicas:
            self._candidates = replicas, tuple(self._names[number] for number in replicas)
        hint, name = self._hint(request), str(request)
        choice = self.desk.decide(self._candidates[1], hint, now_s)
        self.desk.commit(choice, name, hint, now_s)
        self.desk.accepted(name, choice.replica_id, hint, now_s)
        self._sent_s[request] = now_s
        return int(choice.replica_id[-4:])

    def ended(self, request: int, replica: int, now_s: float) -> None:
        """See Router."""
        self.desk.served(self._names[replica], self._sent_s.pop(request, now_s), now_s)
        self.desk.ended(str(request), self._names[replica])

    def failed(self, request: int, replica: int, now_s: float) -> None:
        """See Router."""
        self.desk.failed(self._names[replica], now_s)
        self.desk.ended(str(request), self._names[replica])

    def look(self, view: FleetColumns, asked_s: float) -> None:
        """See Router."""
        self.desk.take(view, asked_s)

    def _hint(self, request: int) -> RouteHint:
        work, hint = self._scene.work, hint_of(self._scene, request, self._expected)
        ids = work.prefix_ids[work.prefix_at[request] : work.prefix_at[request + 1]]
        if not len(ids):
            return hint
        prompt = hint.prompt_tokens
        text = np.repeat(ids, min(prompt, work.prefix_span) * BYTES_PER_TOKEN // 8)[: prompt * BYTES_PER_TOKEN // 8]
        return replace(hint, prefix_chain=prefix_chain([text.tobytes()]))


class _Counting:
    """Owner of requests in flight per replica, for the routers that read no reports."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._load = np.zeros(len(scene.blocks))

    def _weight(self, request: int) -> float:  # noqa: ARG002 - one request is one request
        return 1.0

    def _send(self, request: int, replica: int) -> int:
        self._load[replica] += self._weight(request)
        return replica

    def ended(self, request: int, replica: int, now_s: float) -> None:  # noqa: ARG002 - see Router
        """See Router."""
        self._load[replica] -= self._weight(request)

    failed = ended

    def look(self, view: FleetColumns, asked_s: float) -> None:
        """See Router: nothing is read."""


class PrefixAffinity(_Counting):
    """Hashing with bounded loads."""

    def choose(self, request: int, now_s: float, replicas: Sequence[int]) -> int:  # noqa: ARG002 - see Router
        """See Router."""
        at = self._scene.work.prefix_at[request]
        own = self._scene.work.prefix_ids[at + self._depth(request)] if self._depth(request) >= 0 else -request
        home = replicas[hash((int(own), 0x5EED)) % len(replicas)]
        living = self._load[list(replicas)]
        if self._load[home] <= OVERLOAD * float(living.mean()) + 1.0:
            return self._send(request, home)
        return self._send(request, replicas[int(living.argmin())])

    def _depth(self, request: int) -> int:
        """Index of the id that names the home: the second one, because a first one may be everybody's system prompt."""
        count = int(self._scene.work.prefix_at[request + 1] - self._scene.work.prefix_at[request])
        return min(count - 1, 1)


class Oracle(_Counting):
    """Least memory promised to requests that have not ended, as a share of the pool, slow replicas counted as full."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        slowness = np.array(scene.slowness or [1.0] * len(scene.blocks))
        self._worth = slowness / (np.array(scene.blocks) * scene.block_size)

    def choose(self, request: int, now_s: float, replicas: Sequence[int]) -> int:  # noqa: ARG002 - see Router
        """See Router."""
        living = list(replicas)
        after = (self._load[living] + self._weight(request)) * self._worth[living]
        return self._send(request, living[int(after.argmin())])

    def _weight(self, request: int) -> float:
        work, options = self._scene.work, self._scene.options
        prompt, output = int(work.prompt_tokens[request]), int(work.output_tokens[request])
        return float(max(prompt, options.target_tokens(prompt + output)))


def shared(name: str, scene: Scene, count: int, seed: int) -> list[Router]:
    """The routers of `count` ingresses; there is one oracle for all."""
    if name == "oracle":
        return [make(name, scene, seed)] * count
    return [make(name, replace(scene), seed * 1000 + number) for number in range(count)]
