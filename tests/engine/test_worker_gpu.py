"""The GPU worker's part of a step: rows are ours in steps that the scheduler has granted, and in no other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine.test_worker_substrate import scheduled
from vtoken.core.config import VTokenConfig
from vtoken.core.wire import Grant
from vtoken.device.cuda_scorer import ScorerRoom
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


@pytest.mark.parametrize(("policy", "requests"), [("none", 0), ("streaming_llm", 0), ("key_norm", 0), ("h2o", 8)])
def test_queries_are_kept_where_the_engines_own_policy_looks_at_attention(policy: str, requests: int) -> None:
    from vtoken.engine.worker_gpu import scorer_room

    config = VTokenConfig.from_mapping({"policy": {"policy": policy, "budget_tokens": 64} if policy != "none" else {}})
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=512, get_num_attention_heads=lambda parallel: 9),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256), parallel_config=None,
    )  # fmt: skip
    assert scorer_room(config, vllm_config) == ScorerRoom(requests, 256, 512, 9)
