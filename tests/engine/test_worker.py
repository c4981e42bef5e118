"""The CPU worker: what the scheduler must know leaves with the step's output, and idle steps are vLLM's alone."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken.core.config import VTokenConfig
from vtoken.core.wire import Grant, Report
from vtoken.engine import session
from vtoken.engine.backend_cpu import VTokenCPUImpl, VTokenCPUMetadataBuilder
from vtoken.engine.wire import GrantEnvelope, ReportEnvelope
from vtoken.engine.worker import VTokenCPUWorker


@pytest.fixture
def happened(monkeypatch):
    """vLLM's half of the worker, which writes down when it is called; `.of_forward`: what its `execute_model` gives."""
    seen = SimpleNamespace(calls=[], of_forward=None)
    monkeypatch.setattr(CPUWorker, "execute_model", lambda *_: seen.calls.append("forward") or seen.of_forward)
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    monkeypatch.setattr(CPUWorker, "sample_tokens", lambda *_: seen.calls.append("sample") or output)
    return seen


def worker(seen, report) -> VTokenCPUWorker:
    made = object.__new__(VTokenCPUWorker)
    made.substrate = SimpleNamespace(
        config=VTokenConfig(), before_forward=lambda *_: seen.calls.append("before"),
        after_forward=lambda: seen.calls.append("after"), report=lambda: report,
        due_statistics=lambda: {"steps_total": 5},
    )  # fmt: skip
    return made


def scheduled() -> SimpleNamespace:
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        num_scheduled_tokens={}, scheduled_new_reqs=[], scheduled_cached_reqs=cached, finished_req_ids=set(),
        preempted_req_ids=None, kv_connector_metadata=GrantEnvelope(Grant((), 0, {}, 0.0)),
    )  # fmt: skip


def test_report_and_statistics_leave_with_the_output_of_the_step(happened) -> None:
    report = Report(3, ())
    one = worker(happened, report)
    assert one.execute_model(scheduled()) is None
    output = one.sample_tokens(None)
    assert happened.calls == ["before", "forward", "after", "sample"]
    told = output.kv_connector_output
    assert told.kv_connector_worker_meta == ReportEnvelope(report)
    assert told.kv_connector_stats.data == {"steps_total": 5}


def test_a_step_without_a_forward_tells_as_well_and_leaves_the_shared_empty_output_alone(happened) -> None:
    happened.of_forward = EMPTY_MODEL_RUNNER_OUTPUT
    output = worker(happened, None).execute_model(scheduled())
    assert output.kv_connector_output.kv_connector_stats.data == {"steps_total": 5}
    assert output.kv_connector_output.kv_connector_worker_meta is None
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None


@pytest.mark.parametrize(("evicts", "reader", "ours"), [(False, "auto", False), (True, "auto", True),
                                                        (False, "strict", True)])  # fmt: skip
def test_a_step_in_which_nobody_forgets_is_read_by_vllms_implementation_alone(evicts, reader, ours, monkeypatch):
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "__init__", lambda *_: None)
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", lambda *_: "built")
    impl = object.__new__(VTokenCPUImpl)
    layers = {"one": SimpleNamespace(impl=impl)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    builder = VTokenCPUMetadataBuilder(None, ["one"], config, "cpu")
    substrate = SimpleNamespace(
        shard=SimpleNamespace(evicts=False), config=VTokenConfig.from_mapping({"reader": reader}), batch=list
    )
    monkeypatch.setattr(session, "current", lambda: substrate)
    for says in (False, evicts, False, evicts):  # there and back again
        substrate.shard.evicts = says
        assert builder.build(0, Mock(num_reqs=0)) == "built"
    expected = VTokenCPUImpl.forward if ours else CPUAttentionBackendImpl.forward
    assert impl.forward.__func__ is expected
