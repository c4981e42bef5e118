"""Copies of the fleet's view, kept young by polling the controller while somebody uses them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from vtoken.core.routing import RoutingTunables

logger = logging.getLogger("ray.serve")

IDLE_AFTER_S = 5.0
IDLE_POLL_S = 0.5


class Poller(ABC):
    """Owner of a polling task.

    Args:
        poll_s: between two polls while the view is used; IDLE_POLL_S otherwise.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._used_s = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._awake: asyncio.Event | None = None

    @abstractmethod
    async def fetch(self, asked_s: float) -> None:
        """Ask for the view, at `asked_s`, and adopt it. A failure is tried again at the next poll."""

    def use(self, now_s: float) -> None:
        """Note that the view is used now: keeps the poll fast, starts it if it does not run."""
        self._used_s = now_s
        if self._task is None or self._task.done():
            self._awake = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._poll_forever())
        if self._awake is not None:
            self._awake.set()

    async def _poll_forever(self) -> None:
        while True:
            try:
                await self.fetch(time.monotonic())
            except Exception as error:  # noqa: BLE001  # work goes on with an ageing view
                logger.debug("fleet view not fetched: %s", error)
            idle = time.monotonic() - self._used_s > IDLE_AFTER_S
            if not idle:
                await asyncio.sleep(self._poll_s)
                continue
            assert self._awake is not None
            self._awake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._awake.wait(), IDLE_POLL_S)


def tunables_of(raw: Mapping[str, Any]) -> RoutingTunables | None:
    """Settings that the controller sent; None if it has none, or bad ones."""
    if not raw:
        return None
    try:
        return RoutingTunables.from_mapping(raw)
    except Exception as error:  # noqa: BLE001  # whatever was sent, the old settings still work
        logger.warning("router settings ignored: %s", error)
        return None
