"""Every invariant can fail: a seeded fault in the core, or beside it, and the check that notices.

One fixed random program, which is sound without a fault, runs on the toy engine of `model_engine.py` until
a check speaks. (Faults in the table's own arrays: test_table.py. I5 in attention: tests/device/test_strict_reader.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.model_engine import ToyEngine
from vtoken.core import filling, reclamation
from vtoken.core.config import PolicyOptions, Relocation, VTokenConfig
from vtoken.core.errors import InvariantViolation, ProtocolError, VTokenError
from vtoken.core.eviction import Forgetting
from vtoken.core.plan import Plan
from vtoken.core.planner import Surroundings
from vtoken.core.rows import RequestStart
from vtoken.core.table import TokenTable

SIZE, CAPACITY = 4, 60


def program(engine: ToyEngine, seed: int = 5, steps: int = 150) -> list[list[int]]:
    """Prompts of two families, decoding, ends and preemptions; the live ids of every request after each step."""
    rng = np.random.default_rng(seed)
    history = []
    for step in range(steps):
        if step % 7 == 0 and len(engine.requests) < 4:
            options = PolicyOptions("random", 10, None, 3, protect_sinks=1, protect_recent=3)
            engine.add(f"r{step}", RequestStart(options, int(rng.integers(8, 24)), step), step + 1, 1001)
        engine.step({name: 24 if request.begins else 1 for name, request in engine.requests.items()})
        if engine.requests and rng.random() < 0.1:
            name = list(engine.requests)[int(rng.integers(len(engine.requests)))]
            (engine.end if rng.random() < 0.5 else engine.preempt)(name)
        engine.check()
        history.append([token for row in engine.shard.rows.values() for token in row.table.live_ids().tolist()])
    for name in list(engine.requests):
        engine.end(name)
    for _ in range(2):
        engine.step({})
    assert len(engine.free) + len(engine.reserve) == CAPACITY, "I6: blocks leaked"
    return history


def toy(relocation: Relocation) -> ToyEngine:
    return ToyEngine(VTokenConfig(relocation=relocation, theta_f=0.1), SIZE, CAPACITY, headroom=6)


@pytest.mark.parametrize("relocation", list(Relocation))
def test_the_program_is_sound_and_moves_tokens(relocation: Relocation) -> None:
    engine = toy(relocation)
    program(engine)
    assert engine.shard.counters.moves_total > 20
    assert engine.shard.counters.blocks_consumed_total > 0


def lose_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: a commit that forgets to carry one of the tokens over."""
    apply = TokenTable.apply

    def lossy(table: TokenTable, plan: Plan) -> None:
        apply(table, replace(plan, token_ids=plan.token_ids[1:], src_slots=plan.src_slots[1:],
                             dst_slots=plan.dst_slots[1:]))  # fmt: skip

    monkeypatch.setattr(TokenTable, "apply", lossy)


def lose_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: a copy that leaves out its last token."""
    copy = ToyEngine.copy
    monkeypatch.setattr(ToyEngine, "copy", lambda engine, plan: copy(
        engine, replace(plan, src_slots=plan.src_slots[:-1], dst_slots=plan.dst_slots[:-1])))  # fmt: skip


def two_tokens_in_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: a planner that sends two survivors to one place."""
    plan_fill = filling.plan_fill

    def colliding(*arguments: object) -> object:
        found = plan_fill(*arguments)  # type: ignore[arg-type]
        if isinstance(found, Plan) and len(found.dst_slots) > 1:
            found.dst_slots[1] = found.dst_slots[0]
        return found

    monkeypatch.setattr(reclamation, "plan_fill", colliding)


def read_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """I3: tables switch although nothing has been copied yet."""
    monkeypatch.setattr(ToyEngine, "copy", lambda engine, plan: None)


def write_sealed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """I4: a planner that believes every block may be written."""
    monkeypatch.setattr(Surroundings, "unwritable", lambda around, blocks: np.zeros(len(blocks), bool))


def overrate_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """I4: a planner that believes it frees more than it does, and consumes as many blocks as it releases."""
    monkeypatch.setattr(Surroundings, "worth", lambda around, blocks: np.full(len(blocks), 2.0))


def claim_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """I4: two plans under way may consume the same reserve block."""
    monkeypatch.setattr("vtoken.core.reserve.GrantedReserve.take", lambda reserve, blocks: None)


def release_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: a report that names a block which the request still holds."""
    report = reclamation.Reclamation.commit

    def generous(owner: reclamation.Reclamation, row: object, plan: Plan, sequence: int) -> None:
        report(owner, row, plan, sequence)  # type: ignore[arg-type]
        row.released.append(int(row.table.blocks[0]))  # type: ignore[attr-defined]

    monkeypatch.setattr(reclamation.Reclamation, "commit", generous)


def keep_what_was_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: a scheduler that takes released blocks off the lists and does not free them."""
    apply = ToyEngine._apply

    def leaky(engine: ToyEngine, report: object) -> None:
        drop, engine.drop = engine.drop, lambda blocks: None  # type: ignore[method-assign]
        apply(engine, report)  # type: ignore[arg-type]
        engine.drop = drop  # type: ignore[method-assign]

    monkeypatch.setattr(ToyEngine, "_apply", leaky)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Relocation, str]] = [
    (lose_a_token, Relocation.EAGER, "I1"),
    (lose_a_token, Relocation.LAZY, "I1"),
    (lose_bytes, Relocation.EAGER, "bytes are not at its place|another request's memory"),
    (lose_bytes, Relocation.LAZY, "bytes are not at its place|another request's memory"),
    (two_tokens_in_one_slot, Relocation.EAGER, "writes over live tokens"),
    (read_before_the_copy, Relocation.EAGER, "bytes are not at its place|another request's memory"),
    (read_before_the_copy, Relocation.LAZY, "bytes are not at its place|another request's memory"),
    (write_sealed_blocks, Relocation.EAGER, "prefix cache|shared block"),
    (overrate_blocks, Relocation.LAZY, "I4"),
    (claim_nothing, Relocation.LAZY, "bytes are not at its place|another request's memory|I6|disagree|granted"),
    (release_twice, Relocation.EAGER, "another request's memory|bytes are not|I6|writes outside|writes into"),
    (keep_what_was_released, Relocation.EAGER, "reference counts|I6"),
    (keep_what_was_released, Relocation.LAZY, "reference counts|I6"),
]


@pytest.mark.parametrize(("fault", "relocation", "message"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], relocation: Relocation, message: str
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, VTokenError), match=message) as noticed:
        program(toy(relocation))
    assert not isinstance(noticed.value, ProtocolError) or fault in (two_tokens_in_one_slot, claim_nothing)


def test_a_decision_that_depends_on_where_tokens_lie_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: without the fault, hiding, filling and evacuating forget the same tokens at the same steps."""
    assert program(toy(Relocation.EAGER)) == program(toy(Relocation.LAZY))
    choose = Forgetting.choose

    def misled(forgetting: Forgetting, table: TokenTable, *more: object) -> object:
        forgetting.prompt_seed = int(table.tail)
        return choose(forgetting, table, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Forgetting, "choose", misled)
    assert program(toy(Relocation.EAGER)) != program(toy(Relocation.LAZY))


def test_a_table_that_contradicts_itself_says_how() -> None:
    engine = toy(Relocation.EAGER)
    engine.add("a", RequestStart(PolicyOptions(), 9, 1), 1, -1)
    engine.step({"a": 9})
    engine.shard.rows["a"].table.live += 1
    with pytest.raises(InvariantViolation, match=r"I1: live count .*total 9, live 10"):
        engine.check()


def decode(engine: ToyEngine, steps: int) -> None:
    for _ in range(steps):
        engine.step(dict.fromkeys(engine.requests, 1))


def test_an_error_tells_the_story_of_its_request() -> None:
    """A scheduler that forgets to grant a block: the engine's log then shows what was decided before."""
    engine = toy(Relocation.EAGER)
    engine.add("a", RequestStart(PolicyOptions("random", 10, None, 3, protect_recent=3), 16, 1), 1, -1)
    engine.step({"a": 16})
    engine.ledger.blocks_needed = lambda name, tokens: 0  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="new tokens at physical tail") as noticed:
        decode(engine, steps=20)
    (note,) = noticed.value.__notes__
    assert "evict" in note
    assert "fill" in note
