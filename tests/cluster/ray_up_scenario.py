"""`ray up`, a fleet, a killed raylet, recovery, `ray down`: the story of `test_ray_up.py`, told inside the namespaces.

Starts from deploy/clusters/on-prem.yaml as it stands; changed are the addresses, and what would install software or use
the whole machine. Ends with one line of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.cluster.fake_fleet import ENGINES, Traffic, all_of, ask, fake_arguments, takers
from tests.cluster.hosts import PREFIX, ROOT, Host, home, keep_paths, lay_switch, own_places, run
from tests.waiting import until

ADDRESSES = [PREFIX + number for number in ("10", "11", "12")]
ON_PREM = ROOT / "deploy" / "clusters" / "on-prem.yaml"
BIN = Path(sys.executable).parent
PROFILE = f"""
export PATH={BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export AUTOSCALER_UPDATE_INTERVAL_S=2 RAY_health_check_period_ms=1000
"""
"""Of every host; Ray looks for dead nodes more often than it does by default. How long a node may be silent stays as it
is: on a machine under load a worker that takes longer to start would be started again and again."""


def cluster_config(key: Path, fleet: Path) -> dict[str, Any]:
    """The on-prem file for these hosts."""
    config: dict[str, Any] = yaml.safe_load(ON_PREM.read_text())
    config["provider"].update(head_ip=ADDRESSES[0], worker_ips=ADDRESSES[1:])
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(key)}
    config["setup_commands"] = []  # the environment is this machine's
    config["file_mounts"]["~/vtoken/fleet.yaml"] = str(fleet)
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        small = "ray start --num-cpus=2 --object-store-memory=100000000"
        config[name] = [command.replace("ray start", small) for command in config[name]]
    return config


def serve_config() -> dict[str, Any]:
    """One costless replica a node: a second one has no room there."""
    arguments = fake_arguments(
        python_path=f"{home()}/vtoken",
        replicas={"count": len(ADDRESSES), "num_cpus": 1.5},
        limits={"ingress_count": 2, "max_queued_requests": 64},
    )
    application = {"name": "vtoken", "route_prefix": "/", "import_path": "serve_app:build_app", "args": arguments}
    http = {"host": "0.0.0.0", "port": 8000}
    return {"proxy_location": "EveryNode", "http_options": http, "applications": [application]}


def answers(address: str) -> bool:
    """Whether the proxy of a node lets requests through."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://{address}:8000/health", timeout=10.0).status_code == 200
    return False


class Story:
    """The steps, and what was seen at each."""

    def __init__(self) -> None:
        own_places(keep_paths(str(ENGINES)))
        lay_switch()
        self.seen: dict[str, Any] = {}
        self._directory = Path("/tmp/user")
        self._directory.mkdir()
        self._key = self._directory / "key"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._key))
        public_key = self._key.with_suffix(".pub").read_text()
        self.hosts = [Host(address, public_key, PROFILE, keep_paths()) for address in ADDRESSES]
        for host in self.hosts:
            host.await_ssh()
        self.url = f"http://{ADDRESSES[0]}:8000"
        fleet, self._cluster = self._directory / "fleet.yaml", self._directory / "cluster.yaml"
        fleet.write_text(yaml.safe_dump(serve_config()))
        self._cluster.write_text(yaml.safe_dump(cluster_config(self._key, fleet)))

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Notes how long a step took."""
        start_s = time.monotonic()
        print(f"[{step}]", file=sys.stderr, flush=True)
        yield
        self.seen[f"{step}_s"] = round(time.monotonic() - start_s, 1)

    def ray(self, *arguments: str, timeout_s: float = 120.0) -> None:
        """A command of Ray on the user's machine; shown on standard error."""
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "TERM": "dumb"}
        command = [str(BIN / "ray"), *arguments]
        subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=True, timeout=timeout_s)

    def _login(self, host: Host, command: str) -> list[str]:
        return ["ssh", "-i", str(self._key), "-o", "StrictHostKeyChecking=no", f"root@{host.address}", command]

    def show_logs(self) -> None:
        """What Ray's autoscaler on the head said last."""
        command = self._login(self.hosts[0], "tail -n 60 /tmp/ray/session_latest/logs/monitor.*")
        subprocess.run(command, stdout=sys.stderr, check=False)

    def whole(self) -> bool:
        """Whether every node runs a raylet, and as many replicas take requests."""
        return all(host.processes("raylet") for host in self.hosts) and len(takers(self.url)) == len(self.hosts)

    def state(self) -> str:
        """For messages."""
        raylets = {host.address: host.processes("raylet") for host in self.hosts}
        return f"raylets {raylets}, replicas {takers(self.url)}"

    def up(self) -> None:
        """A token, the cluster, the fleet."""
        self.ray("get-auth-token", "--generate")
        with self.timed("up"):
            self.ray("up", "--no-config-cache", "-y", str(self._cluster))
        with self.timed("deploy"):
            command = "cd ~/vtoken && RAY_AUTH_MODE=token serve deploy fleet.yaml"
            self.ray("exec", str(self._cluster), command)
        with self.timed("whole"):
            until(self.whole, 240.0, self.state)
        with self.timed("proxies"):
            until(lambda: all(map(answers, ADDRESSES)), 60.0)
        self.seen["asked"] = sorted({ask(self.url).status_code for _ in range(6)})

    def kill_and_heal(self) -> None:
        """SIGKILL for the raylet of one worker; Ray must start it again, and Serve its replica."""
        host, before = self.hosts[-1], all_of(len(self.hosts), self.url)
        (raylet,) = host.processes("raylet")
        with self.timed("heal"), Traffic(self.url, clients=2, tokens=5) as traffic:
            os.kill(raylet, signal.SIGKILL)
            until(lambda: self.whole() and takers(self.url) - before, 240.0, self.state)
            after = all_of(len(self.hosts), self.url)
        self.seen["raylet_is_new"] = raylet not in host.processes("raylet")
        self.seen["replicas_kept"] = len(after & before)
        self.seen["outcomes"] = {str(key): count for key, count in traffic.outcomes.items()}
        self.seen["asked_again"] = sorted({ask(self.url).status_code for _ in range(6)})

    def down(self) -> None:
        """`ray down`, and what the guide says about the others."""
        with self.timed("down"):
            self.ray("down", "-y", str(self._cluster))
        self.seen["after_down"] = [len(host.processes("raylet")) for host in self.hosts]
        with self.timed("stop"):
            stops = [
                subprocess.Popen(self._login(host, "bash -ic 'ray stop'"), stdout=sys.stderr) for host in self.hosts[1:]
            ]
            self.seen["stopped"] = [stop.wait(timeout=60.0) for stop in stops]
        self.seen["after_stop"] = [len(host.processes("raylet")) for host in self.hosts]


def main() -> None:
    """Tell the story; prints what was seen, of a failure too."""
    story = Story()
    try:
        story.up()
        story.kill_and_heal()
        story.down()
    except Exception as error:  # noqa: BLE001  # the test shows it, with what was seen before
        story.seen["error"] = repr(error)
        story.show_logs()
    print(json.dumps(story.seen), flush=True)


if __name__ == "__main__":
    main()
