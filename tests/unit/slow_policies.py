"""Every shipped policy once more, slowly: lists and dictionaries, written from the policies' docstrings.

And the histories on which both are asked: requests that grow, are observed and forget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from vtoken.core.policies import KeyScores, Needs, RequestView
from vtoken.core.scores import HISTORY_WINDOWS, AttentionLedger, Observation

Mass = dict[int, float]
Statistics = tuple[float, float, float]


@dataclass
class Plain:
    """A decision in Python's own types: all windows there ever were, by their queries' ids; key norm, value norm and
    similarity by token.
    """

    live: int
    candidates: list[int]
    excess: int
    seed: tuple[int, ...]
    windows: list[tuple[range, Mass]]
    last: Mass
    keys: dict[int, Statistics]


def streaming_llm(plain: Plain) -> list[int]:
    return plain.candidates[: plain.excess]


def random(plain: Plain) -> list[int]:
    return np.random.default_rng(plain.seed).choice(plain.candidates, plain.excess, replace=False).tolist()


def h2o(plain: Plain) -> list[int]:
    return first(plain, lambda token: accumulated(plain, token))


def scissorhands(plain: Plain) -> list[int]:
    def times_unimportant(token: int) -> int:
        counter = 0
        for queries, mass in plain.windows[-HISTORY_WINDOWS:]:
            saw = [query for query in queries if query >= token]
            if saw and mass.get(token, 0.0) * plain.live < len(saw):
                counter += 1
        return counter

    return first(plain, lambda token: (-times_unimportant(token), plain.windows[-1][1].get(token, 0.0)))


def tova(plain: Plain) -> list[int]:
    return first(plain, lambda token: plain.last.get(token, 0.0))


def snapkv(plain: Plain) -> list[int]:
    _, mass = plain.windows[-1]

    def pooled(token: int) -> float:
        return max(mass.get(other, 0.0) for other in range(token - 3, token + 4) if other in plain.candidates)

    return first(plain, lambda token: (pooled(token), mass.get(token, 0.0)))


def fastgen(plain: Plain) -> list[int]:
    def kept(forgotten: list[int]) -> float:
        return added(accumulated(plain, token) for token in plain.candidates if token not in forgotten)

    local, heavy = streaming_llm(plain), h2o(plain)
    return local if kept(local) >= 0.95 * kept(heavy) else heavy


def key_norm(plain: Plain) -> list[int]:
    return first(plain, lambda token: -plain.keys[token][0])


def keydiff(plain: Plain) -> list[int]:
    return first(plain, lambda token: -plain.keys[token][2])


def paged_eviction(plain: Plain) -> list[int]:
    def worth(page: range) -> float:
        return added(plain.keys[token][1] / plain.keys[token][0] for token in page) / 16

    pages = [range(start, start + 16) for start in range(0, plain.candidates[-1], 16)]
    whole = [page for page in pages if all(token in plain.candidates for token in page)]
    return [token for page in sorted(whole, key=worth)[: plain.excess // 16] for token in page]


REFERENCES: dict[str, Callable[[Plain], list[int]]] = {
    "streaming_llm": streaming_llm,
    "random": random,
    "h2o": h2o,
    "scissorhands": scissorhands,
    "tova": tova,
    "snapkv": snapkv,
    "fastgen": fastgen,
    "key_norm": key_norm,
    "keydiff": keydiff,
    "paged_eviction": paged_eviction,
}


def first(plain: Plain, rank: Callable[[int], object]) -> list[int]:
    """The `excess` candidates of lowest rank; equal ones in ascending order."""
    return sorted(plain.candidates, key=rank)[: plain.excess]


def accumulated(plain: Plain, token: int) -> float:
    return added(mass.get(token, 0.0) for _, mass in plain.windows)


def added(numbers: Iterable[float]) -> float:
    """One after the other; `sum` compensates for rounding in newer Pythons, and numpy does not."""
    total = 0.0
    for number in numbers:
        total += number
    return total


# ---- Histories ------------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """One request, lived at random; every second one has scores with many ties, which floats add up exactly."""

    number: int
    total: int = 0
    live: list[int] = field(default_factory=list)
    windows: list[tuple[range, Mass]] = field(default_factory=list)
    last: Mass = field(default_factory=dict)
    ledger: AttentionLedger = field(default_factory=AttentionLedger)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.number)
        self.sinks, self.recent = int(self.rng.integers(0, 5)), int(self.rng.integers(1, 30))
        self.tied, self.forgets_more = bool(self.number % 2), bool(self.number // 2 % 2)
        self.locality = float(self.rng.choice([0.0, 0.03, 0.3]))
        self.decode(int(self.rng.integers(self.sinks + self.recent + 1, 150)))

    def decode(self, tokens: int) -> None:
        """So many tokens come, and their queries are a window."""
        self.live += range(self.total, self.total + tokens)
        self.total += tokens
        mass, last = self.attention(tokens), self.attention(1)
        self.ledger.observe(Observation(np.array(self.live), mass, last, tokens, self.total))
        self.windows.append((range(self.total - tokens, self.total), dict(zip(self.live, mass.tolist(), strict=True))))
        self.last = dict(zip(self.live, last.tolist(), strict=True))

    def attention(self, queries: int) -> np.ndarray:
        """What so many queries give to the live tokens; the more local, the less to old ones."""
        weights = self.rng.random(len(self.live)) * np.exp(self.locality * (np.array(self.live) - self.total))
        return np.floor(weights * 4) * queries / 64 if self.tied else weights * queries / weights.sum()

    def die(self, tokens: Iterable[int]) -> None:
        gone = set(tokens)
        self.live = [token for token in self.live if token not in gone]

    def lose_some(self) -> None:
        """In half of the stories tokens die that no policy chose."""
        if self.forgets_more:
            candidates = self.candidates()
            self.die(self.rng.choice(candidates, len(candidates) // 10, replace=False).tolist())

    def candidates(self) -> list[int]:
        return [token for token in self.live if self.sinks <= token < self.total - self.recent]

    def statistics(self) -> np.ndarray:
        """Key norms, value norms and similarities of the live tokens."""
        shape = (3, len(self.live))
        return self.rng.choice([0.5, 1.0, 2.0], shape) if self.tied else self.rng.uniform(0.5, 2.0, shape)

    def decision(self, needs: Needs, excess: int | None = None) -> tuple[RequestView, Plain]:
        """The same question twice; what the policy is given can't be written to."""
        candidates = self.candidates()
        excess = int(self.rng.integers(1, len(candidates) + 1)) if excess is None else excess
        seed = (0, self.number, self.total)
        statistics = self.statistics()
        places = np.flatnonzero(np.isin(self.live, candidates))
        ids = np.array(candidates, np.int64)
        attention = self.ledger.of(ids) if needs is Needs.ATTENTION else None
        keys = KeyScores(*statistics).of(places) if needs is Needs.KEYS else None
        for array in [ids, *(getattr(s, name) for s in (attention, keys) if s for name in s.__slots__)]:
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        view = RequestView(self.total, len(self.live), ids, excess, seed, attention, keys)
        by_token = dict(zip(self.live, map(tuple, statistics.T.tolist()), strict=True))
        return view, Plain(len(self.live), candidates, excess, seed, self.windows, self.last, by_token)
