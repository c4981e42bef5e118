"""The fleet that a drill disturbs, and what can be asked about it from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import psutil

from vtoken.core.errors import VTokenError
from vtoken.serving.local import ONE_CORE, LocalFleet
from vtoken.serving.status import StatusError, ask, client_of, fetch

LOOK_S = 0.02
"""Between two looks while a drill waits for something."""

CONTROLLER_PATIENCE_S = 20.0
"""On a machine under load the controller may answer late; then the fleet is a 503 for a moment."""


class DrillError(VTokenError):
    """A drill could not be carried out, which says nothing about its bars."""


def deployment(model: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`args` of a Serve config file: two small CPU replicas, as in deploy/serve/demo-cpu.yaml.

    Args:
        model: directory of the model.
        more: sections and keys on top, merged one level deep.
    """
    args: dict[str, Any] = {
        "model": model,
        "served_model_name": "drill",
        "engine": {
            "distributed_executor_backend": "uni",
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "block_size": 16,
            "max_num_seqs": 16,
            "num_gpu_blocks_override": 512,
            "kv_cache_memory_bytes": 1 << 28,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 2048,
        },
        "vtoken": {"policy": {"policy": "streaming_llm", "budget_tokens": 256, "protect_recent": 64}},
        "replicas": {
            "count": 2,
            "num_cpus": 1,
            "max_ongoing_requests": 24,
            "health_check_period_s": 1,
            "env": ONE_CORE,
        },
    }
    for key, value in (more or {}).items():
        both = isinstance(value, Mapping) and isinstance(args.get(key), Mapping)
        args[key] = {**args[key], **value} if both else value
    return args


class World:
    """Owner of the connection to one fleet.

    Args:
        url: of the fleet.
        local: the same fleet, if this process started it.
        progress: called with a line of text when something has happened.

    Attributes:
        url: of the fleet, without a slash at the end.
        model: the name that requests use.
        http: a client of the fleet.
    """

    def __init__(
        self, url: str, local: LocalFleet | None = None, progress: Callable[[str], None] = lambda _line: None
    ) -> None:
        self.url = url.rstrip("/")
        self.http = client_of(self.url, timeout_s=120.0)
        self.progress = progress
        self._local = local
        self.model: str = ask(self.http, "/v1/models", "data", list)["data"][0]["id"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()

    @property
    def local(self) -> LocalFleet:
        """The fleet's processes.

        Raises:
            DrillError: it was not started here.
        """
        if self._local is None:
            raise DrillError(f"the processes of the fleet at {self.url} are out of reach; leave --address out")
        return self._local

    def own_processes(self) -> list[psutil.Process]:
        """Every process of the fleet, if it was started here; else none."""
        return [] if self._local is None else self._local.processes()

    def fleet(self) -> dict[str, Any]:
        """`/v1/vtoken/fleet`.

        Raises:
            StatusError: it does not answer, for longer than CONTROLLER_PATIENCE_S.
        """
        end_s = time.monotonic() + CONTROLLER_PATIENCE_S
        while True:
            try:
                return fetch(self.http)
            except StatusError:
                if time.monotonic() > end_s:
                    raise
            time.sleep(0.1)

    def replicas(self) -> list[dict[str, Any]]:
        """Entries of the fleet's view."""
        replicas: list[dict[str, Any]] = self.fleet()["replicas"]
        return replicas

    def total(self, key: str) -> int:
        """Sum of a field over the replicas."""
        return sum(replica[key] for replica in self.replicas())

    def busy(self) -> int:
        """Requests that run or wait in the engines."""
        return self.total("running_requests") + self.total("waiting_requests")

    def empty(self) -> bool:
        """Whether nothing runs or waits in any engine, and every block is free or reserved."""
        return all(_is_empty(replica) for replica in self.replicas())

    def wait(self, condition: Callable[[], bool], timeout_s: float, every_s: float = LOOK_S) -> float | None:
        """Seconds until a condition held, or None if it did not within `timeout_s`; looks every `every_s`."""
        start_s = time.monotonic()
        while not condition():
            if time.monotonic() - start_s > timeout_s:
                return None
            time.sleep(every_s)
        return time.monotonic() - start_s

    def settle(self, timeout_s: float = 120.0) -> None:
        """Wait until the fleet is idle.

        Raises:
            DrillError: it is not after `timeout_s`.
        """
        if self.wait(self.empty, timeout_s) is None:
            raise DrillError(f"the fleet is not idle after {timeout_s:.0f} s; nobody else may use it during a drill")


def _is_empty(replica: Mapping[str, Any]) -> bool:
    busy = ("running_requests", "waiting_requests", "tracked_requests", "inflight_plans", "private_blocks")
    returned = replica["free_blocks"] + replica["reserved_blocks"] + replica["shared_blocks"]
    return returned == replica["capacity_blocks"] and not any(replica[key] for key in busy)
