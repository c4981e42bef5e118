"""Runner V2's own half of the connector, unchanged, over ours: what it calls, in which order, and what it carries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vtoken.core.wire import Grant, Report
from vtoken.engine import session
from vtoken.engine.wire import GrantEnvelope, ReportEnvelope

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))


def step() -> SimpleNamespace:
    return SimpleNamespace(
        kv_connector_metadata=GrantEnvelope(Grant((), 0, {}, 0.0)), has_sync_kv_loads=False, finished_req_ids={"gone"}
    )


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the substrate has been asked."""
    seen: list[str] = []

    def noted(name: str, answer=None):
        return lambda *given: (seen.append(name), answer)[1]

    substrate = SimpleNamespace(
        bind_caches=lambda caches: seen.append(f"bind {', '.join(caches)}"), after_forward=noted("after the forward"),
        due_statistics=noted("statistics", {"moves_total": 3}), report=noted("report", Report(7, ())),
    )  # fmt: skip
    monkeypatch.setattr(session, "_session", session._Session(substrate))
    return seen


@pytest.fixture
def active(happened: list[str], monkeypatch: pytest.MonkeyPatch):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.worker.gpu import kv_connector as v2

    from vtoken.engine.connector import VTokenConnector

    ours = VTokenConnector(CONFIG, KVConnectorRole.WORKER, None)
    monkeypatch.setattr(v2, "get_kv_transfer_group", lambda: ours)
    monkeypatch.setattr(v2, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(v2, "get_forward_context", lambda: None)
    return v2.ActiveKVConnector(CONFIG, {"layers.0": torch.zeros(1), "layers.1": torch.zeros(1)})


def test_a_step_ends_in_copies_then_numbers_then_the_report(active, happened: list[str]) -> None:
    batch = SimpleNamespace(idx_mapping=None, req_ids=["a"], num_tokens=1)
    active.pre_forward(step(), batch, attn_metadata={})
    active.finish_forward()
    assert happened == ["bind layers.0, layers.1"], "the substrate has acted already, in the worker"
    output = active.post_forward({"gone"})
    assert happened[1:] == ["after the forward", "statistics", "report"]
    assert output.kv_connector_worker_meta == ReportEnvelope(Report(7, ()))
    assert output.kv_connector_stats.data == {"moves_total": 3}
    assert (output.finished_sending, output.finished_recving, output.invalid_block_ids) == (None, None, set())


def test_a_step_without_a_forward_reports_too(active, happened: list[str]) -> None:
    output = active.no_forward(step())
    assert happened[1:] == ["after the forward", "statistics", "report"]
    assert output.kv_connector_output.kv_connector_worker_meta == ReportEnvelope(Report(7, ()))


def test_nothing_is_asked_while_vllm_warms_up_and_captures(active, happened: list[str]) -> None:
    from vllm.distributed.kv_transfer import kv_transfer_state

    before = kv_transfer_state._KV_CONNECTOR_AGENT
    active.set_disabled(True)
    active.pre_forward(step())
    active.finish_forward()
    assert active.post_forward(set()) is None
    active.set_disabled(False)
    kv_transfer_state._KV_CONNECTOR_AGENT = before
    active.reset_capture_state()
    assert happened == ["bind layers.0, layers.1"]
