"""Faults of telemetry in a fleet that this process started, and other settings for its routers."""

from __future__ import annotations

import asyncio
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

TIMEOUT_S = 20.0


class DisturbError(VTokenError):
    """A fault could not be made, or ended."""


def inject(replica_id: str, fault: str) -> None:
    """Begin or end a fault of one replica's reports (`vtoken.serving.faults`).

    Raises:
        DisturbError: that replica did not do it.
    """
    answers = asyncio.run(_asked(replica_id, fault))
    if True not in answers:
        raise DisturbError(f"replica {replica_id} did not take the fault {fault!r}: {answers}")


async def _asked(replica_id: str, fault: str) -> list[Any]:
    handle = serve.get_deployment_handle("engine", APP_NAME)
    return [answer async for answer in broadcast(handle, "inject", replica_id, fault, timeout_s=TIMEOUT_S)]


def kill_controller() -> None:
    """End the controller's process; Ray starts another one."""
    ray.kill(ray.get_actor(controller_name(APP_NAME), namespace=NAMESPACE), no_restart=False)


def tune(settings: DeploymentSettings, router: Mapping[str, Any]) -> None:
    """Give every router other settings, from its next view on.

    Args:
        settings: of the fleet.
        router: on top of its own ones.
    """
    changed = replace(settings, router=replace(settings.router, **router))
    controller = ray.get_actor(controller_name(APP_NAME), namespace=NAMESPACE)
    ray.get(controller.configure.remote(asdict(changed.tunables), changed.rules), timeout=TIMEOUT_S)
