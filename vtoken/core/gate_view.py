"""From the controller's view of the fleet to what a gate may let in. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vtoken.core.columns import COLUMNS, FleetColumns, Membership
from vtoken.core.gate_room import GateRoom
from vtoken.core.gates import GatePeers
from vtoken.core.placement import Pools
from vtoken.core.routing import RoutingTunables


class GateView:
    """Owner of the last view that a gate was given.

    Args:
        tunables: until a view brings others.

    Attributes:
        membership: of the view, for whoever fetches the next one.
        seen_s: when the view was asked for; -inf before the first one.
    """

    def __init__(self, tunables: RoutingTunables) -> None:
        self._tunables = tunables
        self._view: FleetColumns | None = None
        self._told_tokens: int | None = None
        self.membership: Membership | None = None
        self.seen_s = float("-inf")

    def take(
        self,
        view: FleetColumns,
        asked_s: float,
        tunables: RoutingTunables | None = None,
        told_tokens: int | None = None,
    ) -> None:
        """Adopt a view that was asked for at `asked_s`, when the gate reported `told_tokens` as committed."""
        if view.ids is None and view.membership != self.membership:
            return  # the answer to an older question
        known = None if self._view is None else self._view.ids
        if view.ids is None or view.ids == known:
            view = replace(view, ids=known)  # the same object, by which placements know them
        self._view, self.seen_s, self.membership = view, asked_s, view.membership
        self._told_tokens = told_tokens
        self._tunables = tunables or self._tunables

    @property
    def replicas(self) -> int:
        """How many the view shows."""
        return 0 if self._view is None else len(self._view.table)

    @property
    def pool_tokens(self) -> int | None:
        """Tokens that the largest replica's blocks hold, less its headroom; None while that is not known of all."""
        if self._view is None or not len(self._view.table):
            return None
        column = _columns(self._view)
        blocks = column["capacity_blocks"] - column["headroom_target_blocks"]
        known = bool((column["capacity_blocks"] > 0).all())
        return int((blocks * column["block_size_tokens"]).max()) if known else None

    def room(self, max_ongoing: int, ingresses: int, now_s: float) -> GateRoom:
        """The room at `now_s`; `max_ongoing` is of one replica."""
        if self._view is None:
            return GateRoom(0, ingresses=ingresses, lives=False)
        room = gate_room(self._view, now_s - self.seen_s, self._tunables, max_ongoing, ingresses)
        return replace(room, peers=self._view.peers or GatePeers(), told_tokens=self._told_tokens)


def _columns(view: FleetColumns) -> dict[str, NDArray[np.int64]]:
    return dict(zip(COLUMNS, view.table.T, strict=True))


def gate_room(
    view: FleetColumns, view_age_s: float, tunables: RoutingTunables, max_ongoing: int, ingresses: int
) -> GateRoom:
    """The room, from a view that was fetched `view_age_s` ago; `max_ongoing` is of one replica.

    Memory is judged only while every replica that takes requests has a fresh report, and by replica only with the
    view's ids; places always.
    """
    column = _columns(view)
    takes = column["draining"] == 0
    count = int(takes.sum())
    requests = column["running_requests"] + column["waiting_requests"]
    # Whoever is inside a draining replica has a place, and must not take one of another replica.
    places = -(-(count * max_ongoing + int(requests[~takes].sum())) // ingresses)
    busy = requests > 0
    fresh = view.age_s + view_age_s <= np.where(busy, tunables.stale_busy_s, tunables.stale_idle_s)
    known = bool((fresh & (column["capacity_blocks"] > 0))[takes].all())
    if not (known and tunables.hold_for_memory):
        return GateRoom(places, None, ingresses=ingresses, lives=count > 0)
    owed = np.maximum(0, column["headroom_target_blocks"] - column["reserved_blocks"])
    room = column["free_blocks"] + column["reclaimable_blocks"] * tunables.confidence - owed
    in_use = column["capacity_blocks"] - column["free_blocks"] - column["reserved_blocks"]
    used = np.maximum(in_use, column["referenced_blocks"])  # what requests share, each of them has
    size = column["block_size_tokens"]
    free_tokens: NDArray[np.float64] = np.where(takes, np.maximum(0.0, room), 0.0) * size
    used_tokens: NDArray[np.float64] = used * size.astype(np.float64)
    pools = None if view.ids is None else Pools(view.ids, takes, free_tokens, used_tokens, requests)
    return GateRoom(places, float(free_tokens.sum()), float(used_tokens.sum()), ingresses, lives=count > 0, pools=pools)
