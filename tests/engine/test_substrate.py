"""The worker's substrate over a real copy engine: copies that are slow, fail, arrive wrong or outlive their request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from vtoken.core.config import PolicyOptions, Relocation, VTokenConfig
from vtoken.core.history import Event
from vtoken.core.rows import RequestStart, RowStep, Step
from vtoken.core.table import RowState
from vtoken.core.telemetry import Phase
from vtoken.core.wire import Grant, RequestGrant
from vtoken.device.copy_engine import Slots, Ticket, TicketState
from vtoken.device.cpu_copy import CpuCopyEngine
from vtoken.device.errors import CopyFailed
from vtoken.engine.substrate import STATISTICS_SECONDS, Substrate

SIZE, BLOCKS = 16, 24
RESERVE = (20, 21, 22, 23)
OPTIONS = PolicyOptions("random", 40, None, 8, protect_sinks=2, protect_recent=8)


class Held(CpuCopyEngine):
    """The real engine, with asynchronous copies that wait for `go`, and faults on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.fail = self.corrupt = False

    def submit(self, src: Slots, dst: Slots) -> Ticket:
        ticket = Ticket(1, src, dst, TicketState.RUNNING)

        def work() -> None:
            self.go.wait(30)
            if self.fail:
                ticket.settle(TicketState.FAILED, CopyFailed("made to fail"))
                return
            self.copy(src, dst)
            ticket.settle(TicketState.DONE)

        threading.Thread(target=work, daemon=True).start()
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        return False

    def copy(self, src: Slots, dst: Slots) -> None:
        super().copy(src, dst)
        if self.corrupt and len(dst):
            self.poison(np.array([dst[0] // SIZE]))


class Bench:
    """One request on one worker, step by step; its cache holds the token id in every element."""

    def __init__(self, relocation: Relocation, **settings: Any) -> None:
        self.copies = Held()
        self.urgency = 0.0
        config = VTokenConfig(relocation=relocation, theta_f=0.1, **{"check_moves": 1.0, **settings})
        self.substrate = Substrate(config, SIZE, self.copies, lambda: ["a"])
        self.cache = torch.full((BLOCKS, 2, SIZE, 2 * 16), -1.0)
        self.substrate.bind_caches({"layer": self.cache})
        self.length = 0
        self.blocks = list(range(1, 20))

    def step(self, tokens: int, **step: tuple[str, ...]) -> None:
        begins = self.length == 0
        rows = () if "ended" in step else (RowStep("a", tuple(self._new(tokens)), self.length, tokens, begins),)
        started = {"a": RequestStart(OPTIONS, 64, 1)} if begins else {}
        grant = Grant(RESERVE, 0, {"a": RequestGrant(1)} if rows else {}, self.urgency)
        self.substrate.before_forward(Step(rows, started=started, **step), grant)
        if rows:
            self._write(tokens)
        self.length += tokens if rows else 0
        self.substrate.after_forward()
        if self.copies.go.is_set():  # a copy that may run is done by the next step: no test depends on speed
            for flight in self.substrate._flights:
                assert flight.ticket.settled.wait(10)

    def _new(self, tokens: int) -> list[int]:
        """Blocks by logical length, as vLLM gives them before the first report."""
        held = -(-self.length // SIZE)
        return [self.blocks.pop(0) for _ in range(-(-(self.length + tokens) // SIZE) - held)]

    def _write(self, tokens: int) -> None:
        slots = self.substrate.rows_of(["a"])[0].write_slots
        assert slots is not None
        for offset, slot in enumerate(slots):
            self._tokens_at(int(slot))[:] = self.length + offset

    def _tokens_at(self, slot: int) -> torch.Tensor:
        """K of one slot in the packed layout: [heads, head_dim]."""
        return self.cache[slot // SIZE].view(2, 2, 16 * SIZE)[:, 0].view(2, 16, SIZE)[:, :, slot % SIZE]

    def seen(self) -> list[int]:
        """Token ids that attention would read, from memory."""
        return [int(self._tokens_at(int(slot))[0, 0]) for slot in self.row.table.live_slots()]

    @property
    def row(self):
        return self.substrate.rows_of(["a"])[0]

    def statistics(self) -> dict:
        return self.substrate.statistics()


@pytest.fixture(params=[Relocation.EAGER, Relocation.LAZY])
def bench(request) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    made.copies.go.set()
    made.substrate.close()


@pytest.fixture
def lazy() -> Iterator[Bench]:
    made = Bench(Relocation.LAZY)
    yield made
    made.copies.go.set()
    made.substrate.close()


def until_planned(bench: Bench) -> None:
    bench.step(64)
    bench.step(1)
    assert bench.statistics()["inflight_plans"] == 1


def test_attention_reads_the_live_tokens_whatever_moves(bench: Bench) -> None:
    bench.copies.go.set()
    bench.step(64)
    for _ in range(100):
        bench.step(1)
        assert bench.seen() == bench.row.table.live_ids().tolist()
        bench.substrate.shard.check_invariants()
    assert bench.statistics()["moves_total"] > 0
    assert bench.statistics()["move_check_failures_total"] == 0


def test_the_engine_goes_on_while_a_copy_is_slow_and_the_table_switches_when_it_is_done(lazy: Bench) -> None:
    until_planned(lazy)
    before = lazy.row.table.blocks.tolist()
    for _ in range(5):
        lazy.step(1)
        assert lazy.row.table.blocks.tolist()[: len(before)] == before
        assert lazy.seen() == lazy.row.table.live_ids().tolist()
    lazy.copies.go.set()
    while lazy.statistics()["moves_total"] == 0:
        lazy.step(1)
    assert set(lazy.row.table.blocks.tolist()) & set(RESERVE)
    assert lazy.seen() == lazy.row.table.live_ids().tolist()


def test_a_failed_copy_changes_nothing_and_its_blocks_can_be_used_again(lazy: Bench) -> None:
    until_planned(lazy)
    before = lazy.row.table.blocks.tolist()
    lazy.copies.fail = True
    lazy.copies.go.set()
    while lazy.row.in_flight is not None:
        lazy.step(1)
    assert lazy.row.table.blocks.tolist()[: len(before)] == before
    assert lazy.seen() == lazy.row.table.live_ids().tolist()
    assert lazy.substrate.shard.reclamation.available() == RESERVE
    lazy.copies.fail = False
    for _ in range(40):
        lazy.step(1)
        assert lazy.seen() == lazy.row.table.live_ids().tolist()
    assert lazy.statistics()["moves_total"] > 0


def test_a_request_that_ends_during_its_copy_gives_the_reserve_back_after_the_copy(lazy: Bench) -> None:
    until_planned(lazy)
    threading.Timer(0.2, lazy.copies.go.set).start()
    lazy.step(0, ended=("a",))  # waits: nothing may land in the reserve afterwards
    assert lazy.copies.go.is_set()
    assert lazy.statistics()["tracked_requests"] == lazy.statistics()["inflight_plans"] == 0
    assert lazy.substrate.shard.reclamation.available() == RESERVE


def test_bytes_that_arrive_wrong_end_relocation_but_not_the_request(bench: Bench) -> None:
    bench.copies.corrupt = True
    bench.copies.go.set()
    bench.step(64)
    for _ in range(40):
        bench.step(1)
        assert bench.row.table.state in (RowState.CLEAN, RowState.HOLEY), "a wrong move was committed"
    found = bench.statistics()
    assert found["move_check_failures_total"] == found["degraded"] == 1
    assert found["moves_total"] == found["inflight_plans"] == 0
    assert found["tokens_evicted_total"] > 0
    assert "differ" in bench.substrate.shard.degraded


def test_the_scorer_hears_of_the_end_of_a_step_in_which_nobody_evicts(bench: Bench) -> None:
    """On a GPU it would take the next step for the same one, and not see its queries."""
    heard: list[None] = []
    bench.substrate.scorer.after_forward = lambda: heard.append(None)
    bench.substrate.before_forward(Step(), Grant())
    bench.substrate.after_forward()
    assert len(heard) == 1


def test_once_a_check_has_failed_what_was_under_way_is_checked_too() -> None:
    lazy = Bench(Relocation.LAZY, check_moves=0.0)
    until_planned(lazy)
    lazy.substrate.shard.degrade("another plan's bytes arrived wrong")
    lazy.copies.corrupt = True
    lazy.copies.go.set()
    while lazy.row.in_flight is not None:
        lazy.step(1)
    assert lazy.statistics()["moves_total"] == 0
    assert lazy.seen() == lazy.row.table.live_ids().tolist()
    lazy.substrate.close()


def test_urgent_memory_waits_for_the_copy_and_gets_the_blocks_in_the_same_step(lazy: Bench) -> None:
    until_planned(lazy)
    lazy.urgency = 0.5
    lazy.step(1)
    assert lazy.statistics()["inflight_plans"] == 1, "half as urgent: the engine goes on"
    lazy.urgency = 1.0
    threading.Timer(0.2, lazy.copies.go.set).start()
    lazy.step(1)
    assert (lazy.statistics()["copy_waits_total"], lazy.statistics()["moves_total"] > 0) == (1, True)
    report = lazy.substrate.report()
    assert report is not None
    assert report.requests[0].released
    assert lazy.seen() == lazy.row.table.live_ids().tolist()


def test_forced_sync_never_leaves_a_copy_under_way() -> None:
    bench = Bench(Relocation.LAZY, forced_sync=True)
    bench.copies.go.set()
    bench.step(64)
    for _ in range(40):
        bench.step(1)
        assert bench.statistics()["inflight_plans"] == 0
        assert bench.seen() == bench.row.table.live_ids().tolist()
    assert bench.statistics()["moves_total"] > 0
    bench.substrate.close()


@pytest.mark.parametrize(("rate", "checks"), [(0.0, 0), (0.25, 3), (1.0, 12)])
def test_the_set_share_of_the_plans_is_checked(rate: float, checks: int) -> None:
    bench = Bench(Relocation.EAGER, check_moves=rate)
    bench.step(64)
    while len(fills(bench)) < 12:
        bench.step(1)
    assert bench.statistics()["move_checks_total"] == checks
    bench.substrate.close()


def fills(bench: Bench) -> list[dict[str, Any]]:
    return [entry for entry in bench.substrate.explain("a")["a"] if entry["event"] == Event.FILL]


def test_the_recorder_tells_what_was_decided_and_why_not(bench: Bench) -> None:
    bench.copies.go.set()
    bench.step(64)
    for _ in range(30):
        bench.step(1)
    bench.step(0, ended=("a",))
    (story,) = bench.substrate.explain("a").values()
    events = [entry["event"] for entry in story]
    assert (events[0], events[-1]) == (Event.BEGIN, Event.END)
    assert sum(e["tokens"] for e in story if e["event"] == Event.EVICT) == bench.statistics()["tokens_evicted_total"]
    moved = [e for e in story if e["event"] in (Event.FILL, Event.EVACUATE)]
    assert sum(entry["tokens"] for entry in moved) == bench.statistics()["moves_total"] > 0
    if bench.substrate.config.relocation is Relocation.LAZY:
        reasons = {entry["reason"] for entry in story if entry["event"] == Event.DEFER}
        assert reasons & {"below_theta_f", "no_gain", "too_dear", "reserve_short"}
    assert bench.substrate.explain("b") == {}


def test_an_operator_reads_the_story_of_a_failed_check(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.copies.corrupt = True
    bench.copies.go.set()
    bench.step(64)
    for _ in range(20):
        bench.step(1)
    assert "evict" in caplog.text
    assert "drop" in caplog.text


def test_details_tell_what_waited_what_was_checked_and_where_the_time_went(lazy: Bench) -> None:
    until_planned(lazy)
    lazy.urgency = 1.0
    threading.Timer(0.2, lazy.copies.go.set).start()
    lazy.step(1)
    lazy.urgency = 0.0
    lazy.step(0, ended=("a",))
    found = lazy.statistics()  # a step without requests may be the last for long: it brings everything
    details = found["details"]
    assert details["copy_wait_seconds_total"][""] > 0
    assert details["oldest_inflight_seconds"][""] == 0
    assert details["last_move_check_timestamp_seconds"][""] > 0
    assert details["block_bytes"][""] == SIZE * 2 * 2 * 16 * 4
    assert details["host_syncs_total"][""] == 0
    lazy.substrate.backend_waits = 2
    lazy.substrate.scorer.decision_waits = 3
    told = lazy.substrate.statistics()["details"]
    assert (told["host_syncs_total"][""], told["decision_waits_total"][""]) == (2, 3)
    assert details["copy_duration_seconds_bucket"]["+Inf"] == found["copies_total"] > 0
    assert details["reclaim_plans_total"]["evacuated"] == 1
    assert details["policy_decisions_total"]["random"] > 0 < details["policy_seconds_total"]["random"]
    phases = details["substrate_phase_seconds_total"]
    assert set(phases) == set(Phase)
    assert sum(phases.values()) == pytest.approx(found["substrate_seconds_total"])


def test_a_busy_engine_does_not_say_its_numbers_in_every_step(lazy: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    lazy.copies.go.set()
    lazy.step(64)
    assert lazy.substrate.due_statistics()["tokens_registered_total"] == 64
    lazy.step(1)
    now_s += 0.9 * STATISTICS_SECONDS
    assert lazy.substrate.due_statistics() == {"steps_total": 2}, "routers compare steps with what runs now"
    now_s += 0.2 * STATISTICS_SECONDS
    assert lazy.substrate.due_statistics()["tokens_registered_total"] == 65
    lazy.step(0, ended=("a",))
    assert lazy.substrate.due_statistics()["tracked_requests"] == 0, "the last step for now is not kept back"


def test_a_busy_engine_says_details_seldom_and_what_it_says_can_be_carried(lazy: Bench) -> None:
    lazy.copies.go.set()
    lazy.step(64)
    first = lazy.substrate.statistics()
    assert "details" not in lazy.substrate.statistics()
    assert json.loads(json.dumps(first))["details"] == first["details"], "plain texts and numbers only"
