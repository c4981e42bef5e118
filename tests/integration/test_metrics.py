"""Real engines, watched by a real Prometheus: boards see them, and show the engines' own numbers.

`tests/observe` asks more, of scripted engines.
"""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.observe import stack as tools
from vtoken.observability import build
from vtoken.observability.catalogue import BY_NAME, METRICS

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
ABSENT_HERE = re.compile(r'ray_vtoken_(gpu_(?!up)|nvml_|admission_wait)|gpu!="none"|headroom_target_blocks\) > 0')
"""What this machine, fleet or load has none of: GPUs, a reserve, requests that wait in line."""


@pytest.fixture(scope="module")
def prometheus(fleet, tmp_path_factory):
    from vtoken.observability.prometheus import LocalPrometheus
    from vtoken.serving.local import free_port
    from vtoken.serving.metrics import metrics_addresses

    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    directory = tmp_path_factory.mktemp("prometheus")
    with LocalPrometheus(metrics_addresses(), ROOT / build.RULES, directory, free_port(), scrape_s=2) as server:
        yield server


def ask(fleet):
    body = {"model": "smol", "messages": [{"role": "user", "content": "The sea."}], "max_tokens": 200}
    answer = fleet.http.post("/v1/chat/completions", json={**body, "ignore_eos": True, "stream": True})
    assert answer.status_code == 200


def test_every_panel_and_alert_sees_real_engines_under_load(fleet, prometheus):
    expressions = [text for text in (*tools.targets(), *tools.alert_values()) if not ABSENT_HERE.search(text)]
    assert len(expressions) > 90
    enough = Event()

    def ask_on():
        while not enough.is_set():
            ask(fleet)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask_on) for _ in range(4)]
        try:
            blind = tools.blind(prometheus, expressions, patience_s=90.0)
        finally:
            enough.set()
        assert blind == []
        for future in futures:
            future.result()


def test_at_rest_every_number_is_the_engine_s_own(fleet, prometheus):
    fleet.await_all_back(timeout_s=30.0)
    replicas = {replica["replica_id"]: replica for replica in fleet.replicas()}
    assert all(replica["blocks_released_total"] for replica in replicas.values())
    for metric in METRICS:
        if metric.fields and not metric.labels:
            wanted = {name: replica[metric.fields[0]] for name, replica in replicas.items()}
            assert tools.settled(prometheus, metric.exported, wanted) == pytest.approx(wanted, abs=1e-9), metric.name
    states = BY_NAME["kv_blocks"].exported
    total = tools.value(prometheus, f"sum({states})")
    assert total == sum(replica["capacity_blocks"] for replica in replicas.values())
