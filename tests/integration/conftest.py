"""One real fleet for all modules that want it, closed before the first test that does not.

Two CPU replicas take the better part of a minute to start and both cores while they run, so they are neither
started per module nor left running beside other tests' engines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL_NAME = "smol"

ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "block_size": 16,
    # 256 blocks of 360 KiB: 4,096 tokens.
    "num_gpu_blocks_override": 256,
    "kv_cache_memory_bytes": 1 << 27,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}

VTOKEN: dict[str, Any] = {
    "check_moves": 1.0,
    "policy": {"policy": "streaming_llm", "budget_tokens": 128, "protect_recent": 32, "interval_tokens": 16},
}


def fleet_arguments(model: Path) -> dict[str, Any]:
    """What stands under `args` in a Serve config file, for a small test fleet."""
    return {
        "model": str(model),
        "served_model_name": MODEL_NAME,
        "engine": ENGINE,
        "vtoken": VTOKEN,
        "replicas": {
            "count": 2,
            "num_cpus": 1,
            "max_ongoing_requests": 10,
            "health_check_period_s": 1,
            "graceful_shutdown_timeout_s": 5,
            "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        },
        "limits": {"max_body_bytes": 1 << 20, "max_queued_requests": 4},
    }


class Fleet:
    """A running fleet and the questions tests ask it."""

    def __init__(self, local: Any, arguments: dict[str, Any]) -> None:
        self.local, self.arguments = local, arguments
        self.url: str = local.url
        self.http = httpx.Client(base_url=local.url, timeout=120.0)

    def replicas(self) -> list[dict[str, Any]]:
        """Their entries in `/v1/vtoken/fleet`; on a machine under load the controller may answer late (503)."""
        end_s = time.monotonic() + 20.0
        while (response := self.http.get("/v1/vtoken/fleet")).status_code == 503 and time.monotonic() < end_s:
            time.sleep(0.1)
        replicas: list[dict[str, Any]] = response.json()["replicas"]
        return replicas

    def total(self, key: str) -> int:
        """Sum of a field over the replicas."""
        return sum(replica[key] for replica in self.replicas())

    def await_running(self, count: int, timeout_s: float = 30.0) -> None:
        """Until exactly this many requests run, and none waits, in the whole fleet."""
        end_s = time.monotonic() + timeout_s
        while (self.total("running_requests"), self.total("waiting_requests")) != (count, 0):
            assert time.monotonic() < end_s, f"not {count} running after {timeout_s} s: {self.replicas()}"
            time.sleep(0.02)

    def await_all_back(self, timeout_s: float) -> None:
        """Until nothing runs, no token table is left and every block is free or reserved."""
        end_s = time.monotonic() + timeout_s
        while not all(self._is_empty(replica) for replica in self.replicas()):
            assert time.monotonic() < end_s, f"not everything is back after {timeout_s} s: {self.replicas()}"
            time.sleep(0.02)

    @staticmethod
    def _is_empty(replica: dict[str, Any]) -> bool:
        busy = ("running_requests", "waiting_requests", "tracked_requests", "inflight_plans", "private_blocks")
        returned = replica["free_blocks"] + replica["reserved_blocks"] == replica["capacity_blocks"]
        return returned and not any(replica[key] for key in busy)

    def close(self) -> None:
        """End it, and see that nothing is left."""
        self.http.close()
        self.local.close()
        assert self.local.processes() == []


_shared: list[Fleet] = []
_next_wants_fleet: list[bool] = [False]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    _next_wants_fleet[0] = nextitem is not None and "fleet" in getattr(nextitem, "fixturenames", ())


@pytest.fixture(scope="module")
def fleet(model_dir: Path) -> Iterator[Fleet]:
    """Two replicas of the real engine behind the real ingress."""
    from vtoken.serving.local import LocalFleet
    from vtoken.serving.settings import DeploymentSettings

    if not _shared:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("RAY_metrics_report_interval_ms", "3000")  # a third of the default: metrics come sooner
        arguments = fleet_arguments(model_dir)
        local = LocalFleet(DeploymentSettings.from_args(arguments), port=0, progress=print)
        local.start()
        _shared.append(Fleet(local, arguments))
    yield _shared[0]
    if not _next_wants_fleet[0]:
        _shared.pop().close()
