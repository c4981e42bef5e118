"""The scorer against the definition of attention mass, whatever the steps were and wherever tokens lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vtoken.core.config import PolicyOptions, VTokenConfig
from vtoken.core.decisions import Decisions
from vtoken.core.eviction import Forgetting
from vtoken.core.history import History
from vtoken.core.reclamation import Reclamation
from vtoken.core.rows import Counters, Row
from vtoken.core.scores import AttentionLedger, Needs
from vtoken.core.table import TokenTable
from vtoken.device.attention_mass import QUERIES_AT_ONCE, attention_mass
from vtoken.device.layout import key_view, value_view
from vtoken.device.scorer import AttentionScorer, chosen_layers

SIZE, HEADS, KV_HEADS, DIM, WINDOW = 16, 6, 2, 32, 8
LAYERS = ("first", "second", "third")
SCALE = DIM**-0.5


class Bench:
    """Requests whose queries, keys and values are random, in three layers, of which the scorer observes two."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, scattered: bool = False) -> None:
        self.rng = np.random.default_rng(seed + 100 * scattered)
        self.caches = {name: torch.full((80, KV_HEADS, SIZE, 2 * DIM), 9.0, dtype=dtype) for name in LAYERS}
        self.scorer = AttentionScorer(2, WINDOW)
        self.scorer.bind(self.caches)
        self.free = self.rng.permutation(80).tolist() if scattered else list(range(80))
        self.dtype = dtype
        self.rows: dict[str, Row] = {}
        self.content: dict[str, dict[str, list[torch.Tensor]]] = {}
        self.source = torch.Generator().manual_seed(seed)

    def add(self, name: str, needs: Needs = Needs.ATTENTION) -> Row:
        forgetting = Forgetting(PolicyOptions("random", 64), 1, 0)
        self.rows[name] = Row(name, TokenTable(SIZE), forgetting, needs=needs)
        self.content[name] = {layer: [] for layer in LAYERS}
        return self.rows[name]

    def step(self, counts: dict[str, int]) -> None:
        """One engine step: tables grow, keys are written, chosen layers are observed."""
        starts = [0]
        for name, count in counts.items():
            table = self.rows[name].table
            while (len(table.blocks) * SIZE) < table.tail + count:
                table.add_blocks([self.free.pop()])
            self.rows[name].write_slots = table.sync_new_tokens(table.total + count)
            starts.append(starts[-1] + count)
        plan = self.scorer.plan([self.rows[name] for name in counts], starts)
        for layer in LAYERS:
            query = torch.randn(starts[-1], HEADS, DIM, generator=self.source).to(self.dtype)
            for name, start, end in zip(counts, starts, starts[1:], strict=False):
                self._write(name, layer, query[start:end])
            if plan is not None and self.scorer.observes(layer):
                self.scorer.observe(layer, query, SCALE, plan)

    def _write(self, name: str, layer: str, query: torch.Tensor) -> None:
        keys, values = torch.randn(2, len(query), KV_HEADS, DIM, generator=self.source).to(self.dtype)
        slots = self.rows[name].write_slots
        assert slots is not None
        block, offset = torch.from_numpy(slots // SIZE), torch.from_numpy(slots % SIZE)
        key_view(self.caches[layer])[block, :, :, offset] = keys
        value_view(self.caches[layer])[block, :, offset] = values
        repeated = keys.repeat_interleave(HEADS // KV_HEADS, 1), values.repeat_interleave(HEADS // KV_HEADS, 1)
        self.content[name][layer] += list(torch.stack([query, *repeated], 1))

    def ledger(self, name: str) -> AttentionLedger:
        row = self.rows[name]
        for seen in self.scorer.drain(name, row.table):
            row.attention.observe(seen)
        return row.attention

    def expected(self, name: str, lives: list[np.ndarray]) -> np.ndarray:
        """The definition in float64: lives[q] are the ids that query q could see, if it was observed."""
        mass = np.zeros(len(self.content[name][LAYERS[0]]))
        for layer in self.scorer._caches:
            content = torch.stack(self.content[name][layer]).double()
            for query, live in enumerate(lives):
                logits = torch.einsum("hd,nhd->hn", content[query, 0], content[live, 1]) * SCALE
                mass[live] += logits.softmax(-1).mean(0).numpy() / len(self.scorer._caches)
        return mass


def test_layers_are_evenly_spaced() -> None:
    assert chosen_layers([str(i) for i in range(30)], 2) == ["7", "22"]
    assert chosen_layers(["a", "b"], 5) == ["a", "b"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("prompt", [[1], [5], [40], [7, 20, 1, 30], [2 * QUERIES_AT_ONCE + 9]], ids=str)
def test_every_query_is_counted_once_whatever_the_chunks(prompt: list[int], dtype: torch.dtype) -> None:
    bench = Bench(1, dtype)
    row = bench.add("a")
    for chunk in prompt:
        bench.step({"a": chunk})
    for _ in range(WINDOW - 1 - prompt.count(1)):
        bench.step({"a": 1})
    ledger = bench.ledger("a")
    total = row.table.total
    found = ledger.of(np.arange(total))
    assert found.queries == total == found.window_queries.sum()
    np.testing.assert_allclose(found.total, bench.expected("a", [np.arange(q + 1) for q in range(total)]), atol=1e-4)
    np.testing.assert_allclose(found.total.sum(), total, rtol=1e-5)
    np.testing.assert_allclose(found.last.sum(), 1.0, rtol=1e-5)
    np.testing.assert_allclose(found.windows.sum(0), found.total, rtol=1e-6)


def test_the_last_queries_of_a_chunk_are_a_window_of_their_own() -> None:
    bench = Bench(2)
    bench.add("a")
    bench.step({"a": 30})
    for _ in range(3):
        bench.step({"a": 1})
    found = bench.ledger("a").of(np.arange(33))
    assert found.window_queries.tolist() == [30 - WINDOW, WINDOW, 3]
    assert found.window_ends.tolist() == [30 - WINDOW, 30, 33]
    bench.add("b")
    bench.step({"b": WINDOW})
    assert bench.ledger("b").of(np.arange(WINDOW)).window_queries.tolist() == [WINDOW]


def test_dead_tokens_receive_nothing_and_full_rings_say_so() -> None:
    bench = Bench(3)
    row = bench.add("a")
    bench.step({"a": 20})
    bench.ledger("a")
    row.table.evict(np.arange(3, 12))
    lives = [np.arange(q + 1) for q in range(20)]
    for count in range(WINDOW):
        assert not bench.scorer.overdue("a")
        lives.append(np.array([t for t in range(21 + count) if not 3 <= t < 12]))
        bench.step({"a": 1})
    assert bench.scorer.overdue("a")
    found = bench.ledger("a").of(np.arange(20 + WINDOW)).total
    assert not bench.scorer.overdue("a")
    np.testing.assert_allclose(found, bench.expected("a", lives), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_placement_and_neighbours_do_not_change_a_bit(dtype: torch.dtype) -> None:
    found = []
    for scattered in (False, True):
        bench = Bench(4, dtype, scattered)
        for name in ("a", "b", "c") if scattered else ("a",):
            bench.add(name, Needs.NOTHING if name == "b" else Needs.ATTENTION)
        bench.step({"a": 33})
        for _ in range(5):
            bench.step({"a": 1})
        if scattered:  # others come, and grow the rings
            bench.step({"b": 9, "c": 1})
        found.append((bench.ledger("a").of(np.arange(38)), bench.scorer.keys(bench.rows["a"].table)))
    (mass, keys), (other_mass, other_keys) = found
    assert (mass.total == other_mass.total).all()
    assert (mass.last == other_mass.last).all()
    assert (keys.key_norms == other_keys.key_norms).all()
    assert (keys.similarity == other_keys.similarity).all()


def test_keys_and_values_have_the_stated_statistics() -> None:
    bench = Bench(5)
    row = bench.add("a", Needs.KEYS)
    bench.step({"a": 25})
    row.table.evict(np.array([2, 7]))
    found, live = bench.scorer.keys(row.table), row.table.live_ids()
    norms, value_norms, cosines = [], [], []
    for layer in bench.scorer._caches:
        content = torch.stack(bench.content["a"][layer]).double()[live][:, :, ::3]  # one of each group's three heads
        keys = content[:, 1]
        unit = keys / keys.norm(dim=2, keepdim=True)
        mean = unit.mean(0)
        norms.append(keys.norm(dim=2).mean(1))
        value_norms.append(content[:, 2].norm(dim=2).mean(1))
        cosines.append(((unit * mean).sum(2) / mean.norm(dim=1)).mean(1))
    np.testing.assert_allclose(found.key_norms, torch.stack(norms).mean(0).numpy(), rtol=1e-5)
    np.testing.assert_allclose(found.value_norms, torch.stack(value_norms).mean(0).numpy(), rtol=1e-5)
    np.testing.assert_allclose(found.similarity, torch.stack(cosines).mean(0).numpy(), atol=1e-5)


def test_a_request_that_starts_again_has_no_past() -> None:
    bench = Bench(6)
    bench.add("a")
    bench.step({"a": 1})
    bench.step({"a": 1})
    bench.scorer.forget("a")
    row = bench.add("a")
    bench.step({"a": 1})
    (seen,) = bench.scorer.drain("a", row.table)
    assert seen.queries == 1
    assert bench.scorer.drain("a", row.table) == []
    assert bench.scorer.drain("never seen", row.table) == []
    bench.scorer.forget("never seen")


def test_rings_grow_with_the_requests_and_are_reused() -> None:
    bench = Bench(7)
    names = [f"r{i}" for i in range(20)]
    for name in names:
        bench.add(name)
        bench.step({name: 1})
    size = bench.scorer.bytes
    assert size >= 20 * WINDOW * HEADS * DIM * 4 * 2
    for name in names:
        (seen,) = bench.scorer.drain(name, bench.rows[name].table)
        assert seen.mass.tolist() == [1.0]
        bench.scorer.forget(name)
    for name in names:
        bench.add(name)
        bench.step({name: 1})
    assert bench.scorer.bytes == size


def test_no_queries_give_no_mass() -> None:
    found = attention_mass(
        torch.zeros(0, HEADS, DIM), np.zeros(0, np.int64), torch.ones(3, KV_HEADS, DIM), np.arange(3), 1.0
    )
    assert found.mass.tolist() == found.last.tolist() == [0.0] * 3


def test_windows_of_a_request_that_is_far_from_its_budget_do_not_pile_up() -> None:
    """Each holds an entry per live token: kept until a decision, they would grow with the square of its length."""
    bench, counters = Bench(8), Counters()
    row = bench.add("a")
    reclamation = Reclamation(VTokenConfig(), counters, History())
    decisions = Decisions(counters, reclamation, bench.scorer, lambda: 0.0)
    for _ in range(20 * WINDOW):
        decisions.keep_up(row)
        bench.step({"a": 1})
    assert not bench.scorer._rings["a"].windows
    assert row.attention.queries == 19 * WINDOW
    found = bench.ledger("a").of(np.arange(row.table.total)).total
    expected = bench.expected("a", [np.arange(query + 1) for query in range(20 * WINDOW)])
    np.testing.assert_allclose(found, expected, atol=1e-4)
