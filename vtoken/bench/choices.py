"""The decisions of one request once more: what was forgotten, and what should have been by the scores of a dense pass.

A policy that looks at attention or keys can't be followed from the prompt alone. So the kept tokens are the engine's,
as its tables said after every step; the dense pass is masked with them (reference.py), and its own attention weights
and keys then say what the policy should have chosen at each decision. Scores are added up in the same windows:

    chunk of the prompt     its early queries; its last `score_window` queries
    decoding                the queries since the last decision, `score_window` at most

Nothing is forgiven about when, how many and which tokens may go; choices may differ where scores are as good as equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vtoken.bench.traces import Trace
from vtoken.core.config import VTokenConfig
from vtoken.core.errors import ProtectedToken
from vtoken.core.eviction import Forgetting, Scores
from vtoken.core.plan import Ints
from vtoken.core.policies import load_policy
from vtoken.core.scores import AttentionLedger, KeyScores, Observation
from vtoken.core.table import TokenTable
from vtoken.device.attention_mass import key_statistics
from vtoken.engine.requests import prompt_seed

WINDOW = VTokenConfig().score_window


@dataclass(frozen=True, slots=True)
class DenseScores:
    """What a dense pass over one text says about attention and keys; by chosen layer.

    Attributes:
        weights: of a query over the keys that it sees, mean over heads and layers, float64 [text, text].
        keys, values: float32 [text, kv_heads, D], after the rotary embedding.
    """

    weights: npt.NDArray[np.float64]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def window(self, first: int, end: int, ids: Ints) -> Observation:
        """The mass that some tokens received from the queries first .. end-1."""
        shares = self.weights[first:end][:, ids]
        return Observation(ids, shares.sum(axis=0), shares[-1], end - first, end)

    def key_scores(self, ids: Ints) -> KeyScores:
        """Statistics of the keys and values of some tokens."""
        found = [key_statistics(keys[ids], values[ids]) for keys, values in zip(self.keys, self.values, strict=True)]
        return KeyScores(*(torch.stack(column).mean(0).numpy() for column in zip(*found, strict=True)))


@dataclass(slots=True)
class Choices:
    """All decisions of one request.

    Attributes:
        forgotten: tokens that the engine forgot. expected: of these, so many that the dense pass would have forgotten.
        wrong_live_sets: steps whose live tokens are none that the budget rule can lead to.
    """

    forgotten: int = 0
    expected: int = 0
    wrong_live_sets: int = 0


class Follower:
    """Lives one request's life again, with a table of its own in which nothing moves."""

    def __init__(self, trace: Trace, scores: DenseScores) -> None:
        self.found = Choices()
        self._trace, self._scores, self._options = trace, scores, trace.options
        self._prompt = len(trace.request.prompt)
        self._table = TokenTable(
            self._prompt + len(trace.live), self._options.protect_sinks, self._options.protect_recent
        )
        self._table.add_blocks([0])
        self._table.sync_new_tokens(self._prompt)
        self._forgetting = Forgetting(self._options, self._prompt, prompt_seed(trace.request.prompt))
        self._ledger, self._counted = AttentionLedger(), 0

    def follow(self) -> Choices:
        """Every step; the query of step 0 is the last prompt token."""
        for step, live in enumerate(self._trace.live):
            if step:
                self._decide(np.array(live[:-1], np.int64))  # the last one came in this step
                self._table.sync_new_tokens(self._prompt + step)
            self.found.wrong_live_sets += self._table.live_ids().tolist() != live
        return self.found

    def _decide(self, kept: Ints) -> None:
        """Forget what the engine forgot, if it was to decide and forgot as many as it should have."""
        if self._table.total - max(self._counted, self._prompt) >= WINDOW:
            self._observe()
        if not self._forgetting.due(self._table):
            return
        self._observe()
        live = self._table.live_ids()
        scores = Scores(self._ledger, self._scores.key_scores(live))
        chosen = self._forgetting.choose(self._table, load_policy(self._options.policy), scores)
        forgotten = np.setdiff1d(live, kept)
        if len(forgotten) != len(chosen):
            return
        try:
            self._table.evict(forgotten)
        except ProtectedToken:
            return
        self.found.forgotten += len(forgotten)
        self.found.expected += len(np.intersect1d(forgotten, chosen))

    def _observe(self) -> None:
        for first, end in self._windows():
            self._ledger.observe(self._scores.window(first, end, self._table.live_ids()))
        self._counted = self._table.total

    def _windows(self) -> Iterator[tuple[int, int]]:
        """Queries that were not counted yet; the prompt was computed in one chunk."""
        begin = self._counted
        if not begin:
            cut, begin = max(self._prompt - WINDOW, 0), self._prompt
            if cut:
                yield 0, cut
            yield cut, self._prompt
        if begin < self._table.total:
            yield begin, self._table.total
