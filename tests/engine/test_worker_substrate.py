"""What our workers add to vLLM's: the substrate acts first in a step, and ends before the worker does."""

from __future__ import annotations

from types import SimpleNamespace

from vtoken.core.wire import Grant
from vtoken.engine import session
from vtoken.engine.wire import GrantEnvelope
from vtoken.engine.worker_substrate import SubstrateWorker


class Engine:
    """In vLLM's place: writes down what happens."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    def execute_model(self, scheduler_output):
        self.happened.append("forward")
        return "output"

    def shutdown(self) -> None:
        self.happened.append("engine ends")


class Worker(SubstrateWorker, Engine):
    def __init__(self) -> None:
        super().__init__()
        self.substrate = SimpleNamespace(
            config=None,
            before_forward=lambda step, grant: self.happened.append(f"substrate, {len(step.rows)} rows"),
            close=lambda: self.happened.append("substrate ends"),
        )


def scheduled(metadata) -> SimpleNamespace:
    """One request that goes on with a new block, one that resumes."""
    cached = SimpleNamespace(req_ids=["a", "b"], new_block_ids=[([4],), None], num_computed_tokens=[7, 0],
                             resumed_req_ids={"b"})  # fmt: skip
    return SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 9}, scheduled_new_reqs=[], scheduled_cached_reqs=cached,
        finished_req_ids={"c"}, preempted_req_ids=None, kv_connector_metadata=metadata,
    )  # fmt: skip


def test_the_substrate_acts_before_the_forward_of_a_granted_step_only() -> None:
    worker = Worker()
    assert worker.execute_model(scheduled(GrantEnvelope(Grant((), 0, {}, 0.0)))) == "output"
    assert worker.execute_model(scheduled(None)) == "output"
    assert worker.happened == ["substrate, 2 rows", "forward", "forward"]


def test_the_substrate_ends_before_the_worker_and_is_forgotten() -> None:
    worker = Worker()
    session.attach(worker.substrate)
    worker.shutdown()
    assert worker.happened == ["substrate ends", "engine ends"]
    assert session._session.substrate is None


def test_a_worker_that_never_came_up_shuts_down_all_the_same() -> None:
    worker = Worker()
    del worker.substrate
    worker.shutdown()
    assert worker.happened == ["engine ends"]
