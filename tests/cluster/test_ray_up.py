"""The real cluster launcher on one machine: three namespaces with sshd stand for three hosts (`hosts.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import UNSHARE, namespace, why_not

pytestmark = [pytest.mark.integration, pytest.mark.cluster]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0


def namespaces() -> set[str]:
    """Process namespaces that hold a process now."""
    found = set()
    for process in psutil.process_iter():
        try:
            found.add(namespace(process.pid, "pid"))
        except OSError:
            continue
    return found


def interfaces() -> set[str]:
    return set(psutil.net_if_stats())


def tell(*module: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module as the world; whatever happens, it ends with all its hosts."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [*UNSHARE, sys.executable, *module]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as world:
        try:
            output, _ = world.communicate(timeout=timeout_s)
        finally:
            world.kill()
    return subprocess.CompletedProcess(command, world.returncode, output)


@pytest.fixture
def hosts_allowed():
    """Skips with the reason where there can be no hosts; afterwards nothing of them is left."""
    if reason := why_not():
        pytest.skip(reason)
    before = namespaces(), interfaces()
    yield
    end_s = time.monotonic() + 10.0
    while not (namespaces() <= before[0] and interfaces() <= before[1]):
        assert time.monotonic() < end_s, f"left behind: {namespaces() - before[0]}, {interfaces() - before[1]}"
        time.sleep(0.1)


@pytest.mark.timeout(TIMEOUT_S + 60.0)
def test_ray_up_deploy_kill_heal_down(hosts_allowed):
    told = tell("-m", "tests.cluster.ray_up_scenario", timeout_s=TIMEOUT_S)
    seen = json.loads(told.stdout.strip().splitlines()[-1])
    print(seen)
    assert "error" not in seen, seen
    assert seen["asked"] == [200]
    assert seen["raylet_is_new"]
    assert seen["replicas_kept"] == 2
    assert seen["asked_again"] == [200]
    assert seen["after_down"][0] == 0, "ray down stops the head"
    assert seen["after_stop"] == [0, 0, 0]


def test_a_world_that_is_killed_takes_its_hosts_along(hosts_allowed):
    """The fixture looks for what is left; here the world never ends by itself."""
    body = (
        "import subprocess, sys, time; from tests.cluster.hosts import *; lay_switch();"
        "hosts = [Host(PREFIX + n, '', '', keep_paths()) for n in ('10', '11')];"
        "[host.await_ssh() for host in hosts]; print('up', flush=True); time.sleep(600)"
    )
    with pytest.raises(subprocess.TimeoutExpired) as stopped:
        tell("-c", body, timeout_s=10.0)
    assert stopped.value.output is not None
    assert b"up" in stopped.value.output
