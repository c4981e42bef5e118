"""A whole fleet on this machine, inside this process's lifetime: for tests, the demo and a first look.

    with LocalFleet(settings, port=8000) as fleet:
        OpenAI(base_url=fleet.url + "/v1", api_key="none")...

Whatever happens in between, Ctrl-C included, no process is left behind: every process of the fleet inherits a
`Mark`, and `close` ends those that Ray has not ended itself (an engine whose replica was killed is no
longer anybody's child).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil
import ray
from ray import serve

from vtoken.core.errors import VTokenError
from vtoken.processes import Mark
from vtoken.serving.application import build_application
from vtoken.serving.settings import DeploymentSettings
from vtoken.signals import undisturbed

APP_NAME = "vtoken"
START_TIMEOUT_S = 600.0

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Explicit, so that neither a token left in the home directory nor a new one written there changes anything.
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
}
"""Set for the fleet's processes where the caller has not set it."""

ONE_CORE = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Environment of a replica on one CPU core, beside `distributed_executor_backend: uni`.

vLLM 0.32 gives a CPU engine's worker a process of its own, so that it can set up OpenMP for it, and the engine's core
spins while it waits for the worker. With one thread there is nothing to set up, and what spins takes the core from
those who compute. With the last variable vLLM leaves "uni" as it is; the engine still has its own process."""


class StartError(VTokenError):
    """The fleet did not come up; the message says why, and where the logs are."""


def free_port() -> int:
    """A TCP port on the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalFleet:
    """Owner of a local Ray instance and the Serve application in it. `start` and `close`, or `with`.

    Args:
        settings: of the deployment.
        port: HTTP port on 127.0.0.1; 0 takes a free one.
        ray_dir: for Ray's sessions; a short absolute path (Unix sockets allow 107 bytes). None: a temporary one,
            removed at the end.
        progress: called with a line of text when something has happened.
        timeout_s: for `start`.
    """

    def __init__(
        self,
        settings: DeploymentSettings,
        port: int = 8000,
        ray_dir: Path | None = None,
        progress: Callable[[str], None] = lambda _line: None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._settings = settings
        self._port = port or free_port()
        self._ray_dir = ray_dir
        self._own_dir: Path | None = None
        self._progress = progress
        self._timeout_s = timeout_s
        self._mark = Mark()
        self._environment: dict[str, str | None] = {}

    @property
    def settings(self) -> DeploymentSettings:
        """As it was started, or last updated."""
        return self._settings

    @property
    def url(self) -> str:
        """Where the ingress listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def logs(self) -> Path:
        """Where the fleet's processes write their logs, Serve's below `serve`."""
        return Path(self._own_dir or self._ray_dir or "") / "session_latest" / "logs"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start Ray, Serve and the application; returns when every replica is ready (about a minute on CPU).

        Raises:
            StartError: the port is taken, a replica cannot start, or `timeout_s` is over; nothing is left behind.
        """
        self.check_port()
        try:
            self._start_ray()
            self._start_serve()
            self._deploy()
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def scale(self, replicas: int) -> None:
        """Change the number of engine replicas; all others go on. Returns at once."""
        self._deploy(replicas)

    def update(self, settings: DeploymentSettings) -> None:
        """Replace every process by one with these settings, a few at a time. Returns at once."""
        self._settings = settings
        self._deploy()

    def replica_pids(self) -> dict[str, int]:
        """Process of each engine replica that serves, by replica id, as far as Serve knows."""
        applications = serve.context._get_global_client().get_serve_details()["applications"]
        replicas = applications[APP_NAME]["deployments"]["engine"]["replicas"]
        running = [one for one in replicas if one["state"] == "RUNNING" and psutil.pid_exists(one["pid"])]
        return {one["replica_id"]: one["pid"] for one in running}

    def processes(self) -> list[psutil.Process]:
        """Every living process of this fleet, however it was started; never this process."""
        return self._mark.processes()

    def close(self) -> None:
        """End everything that `start` started; may be called at any time, more than once. No signal disturbs it."""
        with undisturbed():
            self._close()

    def _close(self) -> None:
        up = ray.is_initialized()
        if up or self.processes():
            self._progress("stopping the fleet")
        try:
            if up:
                # Serve's controller ends in the middle of its own last call, which Ray prints as a failure.
                with contextlib.redirect_stdout(io.StringIO()):
                    with contextlib.suppress(Exception):
                        serve.shutdown()
                    ray.shutdown()
        finally:
            # Interrupted before Ray was up, nobody has told the processes to end: no use in waiting for them.
            self._mark.end_processes(signal_first=None if up else signal.SIGTERM)
            self._restore_environment()
            if self._own_dir is not None:
                shutil.rmtree(self._own_dir, ignore_errors=True)
                self._own_dir = None

    def check_port(self) -> None:
        """See that the port can be had, before anything is started.

        Raises:
            StartError: it is taken, or is no port.
        """
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self._port))
            except (OSError, OverflowError) as error:
                raise StartError(
                    f"port {self._port} on 127.0.0.1 can't be had ({error}): choose another with --port"
                ) from None

    def _start_ray(self) -> None:
        if ray.is_initialized():
            raise StartError("this process is connected to Ray already; a local fleet wants its own")
        self._set_environment()
        if self._ray_dir is None:
            self._own_dir = Path(tempfile.mkdtemp(prefix="vt", dir="/tmp"))  # short, see ray_dir
        self._progress("starting Ray")
        replicas, limits = self._settings.replicas, self._settings.limits
        # Logical CPUs: what the deployments ask for, whatever the machine has; engines set their own threads.
        engines = self._settings.most_replicas * replicas.num_cpus
        num_cpus = int(engines + limits.ingress_count * limits.ingress_num_cpus) + 1
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            namespace=APP_NAME,
            _temp_dir=str(self._own_dir or self._ray_dir),
        )

    def _start_serve(self) -> None:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self._port})

    def _deploy(self, replicas: int | None = None) -> None:
        version = hashlib.sha256(repr(self._settings).encode()).hexdigest()[:16]
        application = build_application(self._settings, replicas, version)
        target = serve.RunTarget(target=application, name=APP_NAME, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)

    def _await_ready(self) -> None:
        wanted, ready, said = self._settings.fewest_replicas, 0, -1
        start_s = time.monotonic()
        while ready < wanted:
            waited_s = time.monotonic() - start_s
            if waited_s > self._timeout_s:
                raise StartError(f"{ready} of {wanted} replicas are ready after {waited_s:.0f} s; {self._log_hint()}")
            self._check_deployment()
            ready = self._ready_count()
            if ready != said:
                said = ready
                self._progress(f"{ready} of {wanted} replicas ready ({waited_s:.0f} s)")
            time.sleep(0.25)

    def _ready_count(self) -> int:
        try:
            body = httpx.get(self.url + "/ready", timeout=5.0).json()
            return int(body["fresh_replicas"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return 0

    def _check_deployment(self) -> None:
        application = serve.status().applications.get(APP_NAME)
        if application is None or application.status.value != "DEPLOY_FAILED":
            return
        reasons = [d.message for d in application.deployments.values() if d.message] or [application.message]
        raise StartError(f"the application cannot start: {' '.join(reasons)[-2000:]} {self._log_hint()}")

    def _log_hint(self) -> str:
        return f"logs: {self.logs}/serve"

    def _set_environment(self) -> None:
        wanted = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
        for name, value in {**wanted, **self._mark.environment}.items():
            self._environment.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def _restore_environment(self) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment = {}
