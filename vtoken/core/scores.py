"""What is known about how much a request's tokens matter: attention mass and key statistics.

Attention mass. At decision time the last queries of a few layers are compared with all live keys:
softmax(q K) with causal masking, averaged over heads and layers, summed over queries. Every query is
counted once, in one **window**: the queries since the last decision, or a chunk of a prompt (whose last
queries are a window of their own, because some policies look at those alone).

    query   1    1    1    2    2    2         window 1: total of queries 1..3 over tokens 0..n
    token 0 .5   .4   .2   .1   .1   .0        window 2: of the next three; tokens that died keep nothing,
    token 1 .3   .3   .5   .2   .1   .1        tokens that came later have 0 in window 1
    ...                                        total = window 1 + window 2; last = the last query alone

Tokens whose K/V came from the prefix cache were never asked about by the queries that were skipped
with them: their mass starts at 0 with the first computed query.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vtoken.core.plan import Ints
from vtoken.core.table import TokenTable

Floats = npt.NDArray[np.float64]

HISTORY_WINDOWS = 8
"""Windows that are kept apart; the total remembers all."""


class Needs(Enum):
    """What a policy must be told about tokens."""

    NOTHING = "nothing"
    KEYS = "keys"
    ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class Observation:
    """One window: the mass that live tokens received from some queries.

    Attributes:
        ids: live token ids, ascending, int64 [n].
        mass: float64 [n]; a query's mass over all tokens sums to 1.
        last: the same of the last query alone, float64 [n].
        queries: how many, one token after another.
        end: the id behind the last query's. Token t was seen by min(queries, end - t) of them, at least 0.
    """

    ids: Ints
    mass: Floats
    last: Floats
    queries: int
    end: int


@dataclass(frozen=True, slots=True)
class AttentionScores:
    """Attention mass of some tokens, as a policy sees it.

    Attributes:
        total: of all queries observed in this life of the request, float64 [n].
        last: of the last one, float64 [n].
        windows: by window, oldest first, float64 [H, n], H <= HISTORY_WINDOWS.
        window_queries: queries in each window, int64 [H].
        window_ends: the id behind the last query of each, int64 [H].
        queries: observed in all.
    """

    total: Floats
    last: Floats
    windows: Floats
    window_queries: Ints
    window_ends: Ints
    queries: int


@dataclass(frozen=True, slots=True)
class KeyScores:
    """Statistics of some tokens' keys and values, averaged over KV heads and chosen layers, float64 [n].

    Attributes:
        key_norms, value_norms: Euclidean lengths.
        similarity: cosine of a key and the mean of all live unit keys, per head.
    """

    key_norms: Floats
    value_norms: Floats
    similarity: Floats

    def of(self, index: Ints) -> KeyScores:
        """The same of some of the tokens."""
        return KeyScores(self.key_norms[index], self.value_norms[index], self.similarity[index])


class ScoreSource(Protocol):
    """Where observations come from: the device that holds queries and keys."""

    def ask(self, request_id: str, table: TokenTable) -> list[Observation]:
        """Begin to count the queries that were not counted yet; the windows that are known at once. `drain` gives
        the others.
        """
        ...

    def ready(self, request_id: str, table: TokenTable) -> bool:
        """Whether a decision may be made now. If not, what it is to know has been asked for, and it is made in one of
        the request's next steps: which one depends on the request's own history alone.
        """
        ...

    def drain(self, request_id: str, table: TokenTable) -> list[Observation]:
        """Windows of the queries that were not given out yet, oldest first."""
        ...

    def overdue(self, request_id: str) -> bool:
        """Whether queries would be lost if they were not drained before the next step."""
        ...

    def keys(self, table: TokenTable) -> KeyScores:
        """Of all live tokens, in ascending order of id."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has lost its K/V; queries that were not drained are gone."""
        ...


class AttentionLedger:
    """Owner of the attention mass of one request in one life, by token id."""

    def __init__(self) -> None:
        self.queries = 0
        self._total: Floats = np.zeros(0)
        self._last: Floats = np.zeros(0)
        self._windows: deque[tuple[int, int, Floats]] = deque(maxlen=HISTORY_WINDOWS)

    def observe(self, seen: Observation) -> None:
        """Add one window."""
        length = int(seen.ids[-1]) + 1 if len(seen.ids) else 0
        self._total = _at_least(self._total, length)
        self._total[seen.ids] += seen.mass
        self._last = np.zeros(len(self._total))
        self._last[seen.ids] = seen.last
        window = np.zeros(length)
        window[seen.ids] = seen.mass
        self._windows.append((seen.queries, seen.end, window))
        self.queries += seen.queries

    def of(self, token_ids: Ints) -> AttentionScores:
        """The scores of some tokens; 0 for those that no observed query could see."""
        length = int(token_ids.max()) + 1 if len(token_ids) else 0
        windows = [_at_least(window, length)[token_ids] for *_, window in self._windows]
        return AttentionScores(
            _at_least(self._total, length)[token_ids],
            _at_least(self._last, length)[token_ids],
            np.array(windows).reshape(len(windows), len(token_ids)),
            np.array([queries for queries, *_ in self._windows], np.int64),
            np.array([end for _, end, _ in self._windows], np.int64),
            self.queries,
        )


def _at_least(array: Floats, length: int) -> Floats:
    """`array`, or a copy of it filled up with zeros."""
    return array if len(array) >= length else np.concatenate([array, np.zeros(length - len(array))])
