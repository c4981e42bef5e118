"""Three Ray nodes on one machine: replicas are spread, a node is lost with all on it, and the fleet is whole again."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections import Counter

import pytest

from tests.cluster.fake_fleet import Traffic, all_of, ask, fake_arguments, fleet_of, takers
from tests.waiting import until
from vtoken.processes import Mark

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

NODES = 3


class ThreeNodes:
    """Owner of the cluster; every process of it carries a mark, and none survives."""

    def __init__(self, monkeypatch):
        self.mark = Mark()
        for name, value in {
            **self.mark.environment,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        }.items():
            monkeypatch.setenv(name, value)
        self.directory = tempfile.mkdtemp(prefix="vt", dir="/tmp")  # short: Unix sockets allow 107 bytes
        self.cluster = None

    def start(self):
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        from vtoken.serving.application import build_application
        from vtoken.serving.local import free_port
        from vtoken.serving.settings import DeploymentSettings

        self.cluster = Cluster()
        for _ in range(NODES):
            self.cluster.add_node(num_cpus=2, temp_dir=self.directory, include_dashboard=False)
        ray.init(self.cluster.address, namespace="vtoken", log_to_driver=False, logging_level=logging.WARNING)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        heartbeat = {"idle_s": 0.5, "batch_s": 0.02}
        settings = DeploymentSettings.from_args(fake_arguments(replicas={"count": NODES}, heartbeat=heartbeat))
        serve.run(build_application(settings), name="vtoken", route_prefix="/")
        return f"http://127.0.0.1:{port}"

    def nodes_of(self, part):
        """Node id of each living actor with this in its name: `#engine#` of a replica, `relay:` of a relay."""
        from ray._private.state import actors

        living = (a for a in actors().values() if a["State"] == "ALIVE" and part in a["Name"])
        return [actor["Address"]["NodeID"] for actor in living]

    def relayed(self):
        """Whether each node with a replica has its one relay."""
        return sorted(self.nodes_of("relay:")) == sorted(set(self.nodes_of("#engine#")))

    def lose(self, node_id):
        """All processes of a node at once, as when its power is gone."""
        (node,) = (node for node in self.cluster.worker_nodes if node.node_id == node_id)
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self):
        import ray
        from ray import serve

        try:
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()
            if self.cluster is not None:
                self.cluster.shutdown()
        finally:
            self.mark.end_processes()
            shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture
def cluster(monkeypatch):
    nodes = ThreeNodes(monkeypatch)
    try:
        yield nodes
    finally:
        nodes.close()
    assert nodes.mark.processes() == []


def test_replicas_are_spread_and_come_back_when_a_node_is_lost(cluster):
    url = cluster.start()
    before, homes = all_of(NODES, url), cluster.nodes_of("#engine#")
    until(cluster.relayed, 60.0, lambda: cluster.nodes_of("relay:"))
    assert set(Counter(homes).values()) == {1}, f"not spread: {homes}"
    (ingress,) = cluster.nodes_of("#ingress#")
    victim = next(node for node in homes if node not in {ingress, cluster.cluster.head_node.node_id})
    with Traffic(url, clients=4, tokens=10) as load:
        cluster.lose(victim)
        until(lambda: takers(url) - before, 90.0, lambda: fleet_of(url))
        after = all_of(NODES, url)
    assert len(after & before) == NODES - 1, "the others went on"
    assert victim not in cluster.nodes_of("#engine#")
    until(cluster.relayed, 60.0, lambda: cluster.nodes_of("relay:"))
    assert load.outcomes[200] > 20
    assert set(load.outcomes) == {200}, load.outcomes
    assert {ask(url).status_code for _ in range(12)} == {200}
