"""A fleet of costless engines (`tests/integration/fake_engine.py`), and what tests ask it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Self

import httpx

from tests.waiting import until

ENGINES = Path(__file__).resolve().parents[1] / "integration"
STEP_S = 0.01
"""Of one token of a fake engine."""


def fake_arguments(python_path: str = "", **sections: Any) -> dict[str, Any]:
    """`args` of a Serve file for fake engines; `sections` replace or add to those below."""
    paths = [str(ENGINES), python_path or os.environ.get("PYTHONPATH", "")]
    replicas = {
        "num_cpus": 1,
        "max_ongoing_requests": 4,
        "health_check_period_s": 0.5,
        "graceful_shutdown_timeout_s": 10,
        "env": {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
    }
    return {
        "model": "fake/fake",
        "engine_service": "fake_engine:FakeEngine",
        "heartbeat": {"idle_s": 0.5},
        "router": {"stale_idle_s": 1.0, "stale_busy_s": 1.0},
        "limits": {"max_queued_requests": 64},
        **sections,
        "replicas": {**replicas, **sections.get("replicas", {})},
    }


def ask(url: str, tokens: int = 1) -> httpx.Response:
    """One unary request; takes `tokens` x STEP_S."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=60.0)


def fleet_of(url: str) -> dict[str, dict[str, Any]]:
    """Replica id -> entry of `/v1/vtoken/fleet`; empty while nobody answers."""
    try:
        response = httpx.get(url + "/v1/vtoken/fleet", timeout=10.0)
    except httpx.HTTPError:
        return {}
    if response.status_code != 200:
        return {}
    return {replica["replica_id"]: replica for replica in response.json()["replicas"]}


def takers(url: str) -> set[str]:
    """Ids of the replicas that report and take requests."""
    return {key for key, replica in fleet_of(url).items() if not replica["draining"] and replica["age_s"] < 2.0}


def all_of(count: int, url: str, timeout_s: float = 60.0) -> set[str]:
    """Ids of the replicas once so many take requests; one look may miss a report that is late."""
    seen: set[str] = set()

    def complete() -> bool:
        nonlocal seen
        seen = takers(url)
        return len(seen) == count

    until(complete, timeout_s, lambda: fleet_of(url))
    return seen


class Traffic:
    """Clients that ask one request after the other, until told to stop. Statuses are counted, errors too."""

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self._url, self._tokens = url, tokens
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]
        self.outcomes: Counter[object] = Counter()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _client(self) -> None:
        while not self._over.is_set():
            try:
                self.outcomes[ask(self._url, self._tokens).status_code] += 1
            except httpx.HTTPError as error:
                self.outcomes[type(error).__name__] += 1
