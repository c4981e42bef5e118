"""The GPU worker's part of a step: rows are ours in steps that the scheduler has granted, and in no other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine.test_worker_substrate import scheduled
from vtoken.core.wire import Grant
from vtoken.engine.batch_order import OrderV2
from vtoken.engine.wire import GrantEnvelope

pytestmark = pytest.mark.filterwarnings("ignore")

COMMON = SimpleNamespace(req_idx=np.array([1, 0]))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch):
    """Ours over vLLM's, whose step only builds metadata."""
    from vllm.v1.worker.gpu_worker import Worker

    from vtoken.engine.worker_gpu import VTokenGPUWorker

    def execute_model(self, scheduler_output):
        self.order.look(COMMON)
        return self.order()

    monkeypatch.setattr(Worker, "execute_model", execute_model)
    made = object.__new__(VTokenGPUWorker)
    made.order = OrderV2(SimpleNamespace(req_states=SimpleNamespace(index_to_req_id={0: "a", 1: "b"})))
    made.substrate = SimpleNamespace(config=None, before_forward=lambda step, grant: None)
    return made


def test_rows_are_the_requests_of_a_granted_step(worker) -> None:
    assert worker.execute_model(scheduled(GrantEnvelope(Grant((), 0, {}, 0.0)))) == ["b", "a"]
    assert worker.order() == [], "the step is over"


def test_a_step_that_vllm_made_up_to_warm_its_kernels_has_no_rows_of_ours(worker) -> None:
    assert worker.execute_model(scheduled(None)) == []


def test_a_step_that_fails_is_over_too(worker) -> None:
    worker.order._runner.req_states.index_to_req_id.clear()
    with pytest.raises(Exception, match="no request at index"):
        worker.execute_model(scheduled(GrantEnvelope(Grant((), 0, {}, 0.0))))
    worker.order.look(COMMON)
    assert worker.order() == []
