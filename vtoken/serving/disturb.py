"""Faults of telemetry in a fleet that this process started, and other settings for its routers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import serve

from vtoken.core.errors import VTokenError
from vtoken.serving.broadcast import broadcast
from vtoken.serving.controller import NAMESPACE, controller_name
from vtoken.serving.local import APP_NAME
from vtoken.serving.settings import DeploymentSettings

TIMEOUT_S = 30.0


class DisturbError(VTokenError):
    """A fault could not be made, or ended."""


def inject(replica_id: str, fault: str) -> int:
    """Begin or end a fault of one replica's reports (`vtoken.serving.faults`); how many it had sent by then.

    Raises:
        DisturbError: that replica did not do it.
    """
    answers = asyncio.run(_asked(replica_id, fault))
    for answer in answers:
        if isinstance(answer, int):
            return answer
    raise DisturbError(f"replica {replica_id} did not take the fault {fault!r}: {answers}")


async def _asked(replica_id: str, fault: str) -> list[Any]:
    handle = serve.get_deployment_handle("engine", APP_NAME)
    return [answer async for answer in broadcast(handle, "inject", replica_id, fault, timeout_s=TIMEOUT_S)]


def kill_controller() -> None:
    """End the controller's process; Ray starts another one."""
    ray.kill(ray.get_actor(controller_name(APP_NAME), namespace=NAMESPACE), no_restart=False)


def tune(settings: DeploymentSettings, router: Mapping[str, Any]) -> None:
    """Give every router other settings, from its next view on; a controller that is just starting is waited for.

    Args:
        settings: of the fleet.
        router: on top of its own ones.

    Raises:
        DisturbError: the controller has not taken them after TIMEOUT_S.
    """
    changed = replace(settings, router=replace(settings.router, **router))
    told = asdict(changed.tunables), changed.rules
    end_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            controller = ray.get_actor(controller_name(APP_NAME), namespace=NAMESPACE)
            ray.get(controller.configure.remote(*told, time.time()), timeout=TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  # Ray's are many while an actor restarts
            if time.monotonic() > end_s:
                raise DisturbError(f"the controller took no settings within {TIMEOUT_S:.0f} s: {error}") from None
            time.sleep(0.2)
        else:
            return
