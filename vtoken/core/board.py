"""Every candidate's effective room, kept ready: arrays built once per view, single rows changed with every request.

    effective room  = (free + reclaimable x confidence - headroom owed - growth promised) x trust
    growth promised = what the running requests will still take: commitments - blocks in use, at least 0
    commitments     = full demand of the requests this router has in flight there
                      + a typical demand for each request of somebody else

A request that this router sent after the snapshot was taken is in `commitments` and not in `blocks in use`: that
is the in-flight correction, and it keeps a burst from piling onto one replica between two heartbeats.

"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vtoken.core.columns import COLUMNS, FleetColumns
from vtoken.core.inflight import InflightLedger
from vtoken.core.pressure import Level
from vtoken.core.routing import RoutingTunables
from vtoken.core.trust import Report, TrustBook

UNKNOWN_BLOCK_TOKENS, UNKNOWN_CAPACITY_BLOCKS = 16, 1 << 20
"""Stand for every replica while none has stepped yet."""

LEAST_GAIN_S = 0.01
"""A row that rode along is adopted if it is that much younger than what is known."""

(
    _SEQUENCE, _LEVEL, _DRAINING, _BLOCK, _CAPACITY, _FREE, _RESERVED, _TARGET, _RECLAIMABLE, _RUNNING, _WAITING,
    _STEPS, _REFERENCED,
) = range(len(COLUMNS))  # fmt: skip

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Board:
    """Owner of one router's arrays over a fixed list of candidates, one row each.

    Attributes (arrays over the rows unless said otherwise):
        ids: the candidates, a tuple.
        room: effective room in blocks.
        outstanding: requests inside, as far as is known.
        trusted: trust, from 0 to 1.
        expires_s: until when the report can be used; -inf without one.
        open, throttled, closed, draining: what the controller says; without a report, open.
        capacity: in blocks. size: of a block in tokens. one_size: the same for all who report, or None.

    Args:
        candidates: replica ids, at least one.
        ledger: what this router has in flight. Whoever changes it for a replica calls `refresh`.
        trust: likewise.
        tunables: in force.

    Raises:
        ValueError: no candidates.
    """

    def __init__(
        self, candidates: Sequence[str], ledger: InflightLedger, trust: TrustBook, tunables: RoutingTunables
    ) -> None:
        if not candidates:
            raise ValueError("no candidates to choose from")
        self.ids = tuple(candidates)
        self._row = {replica_id: row for row, replica_id in enumerate(self.ids)}
        self._ledger, self._trust, self._tunables = ledger, trust, tunables
        count = len(self.ids)
        self._table: Ints = np.zeros((count, len(COLUMNS)), np.int64)
        self._seen: Bools = np.zeros(count, bool)
        self._taken_s: Floats = np.full(count, -np.inf)
        self._moved_s: Floats = np.full(count, -np.inf)
        self._heard: Ints = np.full(count, -1, np.int64)  # sequence number of the last heartbeat, whatever rode along
        self._own: Ints = np.array([ledger.count(replica_id) for replica_id in self.ids], np.int64)
        self.trusted: Floats = np.ones(count)
        self._matched: tuple[tuple[str, ...], NDArray[np.intp], NDArray[np.intp]] | None = None
        self._derive()

    def load(self, view: FleetColumns, ids: tuple[str, ...], asked_s: float, tunables: RoutingTunables) -> None:
        """Adopt a view.

        Args:
            view: the columns; rows that are not newer than what is known only confirm it.
            ids: of its rows.
            asked_s: when it was asked for, on the router's clock.
            tunables: in force from now on.
        """
        self._tunables = tunables
        theirs, ours = self._match(ids)
        self._seen[:] = False
        self._seen[ours] = True
        table, taken_s = view.table[theirs], asked_s - view.age_s[theirs]
        known = self._table[ours, _SEQUENCE]
        newer = (table[:, _SEQUENCE] > known) | ~np.isfinite(self._taken_s[ours])
        same = table[:, _SEQUENCE] == known
        self._taken_s[ours] = np.where(same, np.maximum(taken_s, self._taken_s[ours]), self._taken_s[ours])
        self._adopt(ours[newer], table[newer], taken_s[newer])
        # What rides along may come before its heartbeat. What that one says of level and draining, and whether it is
        # true, counts all the same.
        self._table[ours, _LEVEL], self._table[ours, _DRAINING] = table[:, _LEVEL], table[:, _DRAINING]
        unheard = table[:, _SEQUENCE] > self._heard[ours]
        self._heard[ours] = np.maximum(table[:, _SEQUENCE], self._heard[ours])
        self._judge(ours[unheard], table[unheard], taken_s[unheard])
        self._derive()

    def overtake(self, rides: Mapping[str, tuple[Sequence[int], float]]) -> None:
        """Adopt rows that rode along with answers, by replica, each with the moment of its arrival.

        Level and draining stay the controller's to say. What is hardly newer than what is known, or older, is ignored.
        """
        adopted = False
        for replica_id, (row, taken_s) in rides.items():
            at = self._row.get(replica_id)
            if at is None or not self._seen[at] or row[0] < self._table[at, _SEQUENCE]:
                continue
            if taken_s > self._taken_s[at] + LEAST_GAIN_S:
                level, draining = self._table[at, _LEVEL], self._table[at, _DRAINING]
                self._adopt(np.array([at]), np.array([row], np.int64), np.array([taken_s]))
                self._table[at, _LEVEL], self._table[at, _DRAINING] = level, draining
                adopted = True
        if adopted:
            self._derive()

    def row(self, replica_id: str) -> int | None:
        """A candidate's row."""
        return self._row.get(replica_id)

    def refresh(self, replica_id: str) -> None:
        """The ledger has changed for one replica."""
        row = self._row.get(replica_id)
        if row is not None:
            self._own[row] = self._ledger.count(replica_id)
            self._correct(row, replica_id)

    def age_s(self, replica_id: str, now_s: float) -> float | None:
        """For how long nothing has been heard of a busy candidate; None if it is idle or nothing is known of it.

        One that had nothing to do by its last snapshot was rightly silent until this router sent it something.
        """
        row = self._row.get(replica_id)
        if row is None or not self._seen[row]:
            return None
        since_s = float(self._taken_s[row])
        if self._requests[row] <= 0:
            if not self._ledger.count(replica_id):
                return None
            since_s = max(since_s, self._ledger.oldest_s(replica_id))
        return max(0.0, now_s - since_s)

    def kv_used(self, replica_ids: Sequence[str], now_s: float) -> list[float] | None:
        """Share of the capacity that is not free, one per candidate; None unless all have reported lately."""
        rows = [self._row[replica_id] for replica_id in replica_ids]
        if not bool((self.expires_s[rows] >= now_s).all()):
            return None
        used: list[float] = (self._used[rows] / self.capacity[rows]).tolist()
        return used

    def _match(self, ids: tuple[str, ...]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows of a view that are candidates, and our rows for them."""
        if self._matched is None or self._matched[0] is not ids:
            pairs = [(at, self._row[replica_id]) for at, replica_id in enumerate(ids) if replica_id in self._row]
            both = np.array(pairs, np.intp).reshape(len(pairs), 2)
            self._matched = ids, both[:, 0], both[:, 1]
        return self._matched[1:]

    def _adopt(self, rows: NDArray[np.intp], table: Ints, taken_s: Floats) -> None:
        requests = table[:, _RUNNING] + table[:, _WAITING]
        moved = table[:, _STEPS] != self._table[rows, _STEPS]
        idle = (requests <= 0) & (self._own[rows] == 0)
        fresh = moved | idle | ~np.isfinite(self._moved_s[rows])
        self._moved_s[rows] = np.where(fresh, taken_s, self._moved_s[rows])
        self._table[rows], self._taken_s[rows] = table, taken_s

    def _judge(self, rows: NDArray[np.intp], table: Ints, taken_s: Floats) -> None:
        """Weigh new heartbeats of replicas that hold, or held, requests of ours."""
        places = {row: place for place, row in enumerate(rows.tolist())}
        for replica_id in self._trust.watched():
            place = places.get(self._row.get(replica_id, -1))
            if place is not None:
                _, _, _, _, capacity, free, reserved, _, _, running, waiting, steps, _ = table[place].tolist()
                report = Report(float(taken_s[place]), steps, running + waiting, capacity - free - reserved)
                self._trust.judge(replica_id, report)

    def _derive(self) -> None:
        """All that follows from the table, for every row."""
        table, tunables = self._table, self._tunables
        self.draining: Bools = self._seen & (table[:, _DRAINING] != 0)
        self.open: Bools = table[:, _LEVEL] == Level.OPEN.rank
        self.throttled: Bools = table[:, _LEVEL] == Level.THROTTLED.rank
        self.closed: Bools = table[:, _LEVEL] == Level.CLOSED.rank
        self.capacity: Ints = table[:, _CAPACITY].copy()
        self.size: Ints = np.maximum(1, table[:, _BLOCK])
        self._requests: Ints = table[:, _RUNNING] + table[:, _WAITING]
        owed = np.maximum(0, table[:, _TARGET] - table[:, _RESERVED])
        self._base: Floats = table[:, _FREE] + table[:, _RECLAIMABLE] * tunables.confidence - owed
        self._used: Ints = np.maximum(0, self.capacity - table[:, _FREE] - table[:, _RESERVED])
        self._busy: Bools = (self._requests > 0) | (self._own > 0)
        limit_s = np.where(self._requests > 0, tunables.stale_busy_s, tunables.stale_idle_s)
        self.expires_s: Floats = np.where(self._seen, self._taken_s + limit_s, -np.inf)
        still_s = np.where(self._busy, self._moved_s + tunables.stale_busy_s, np.inf)
        self.expires_s = np.minimum(self.expires_s, still_s)
        self._fill_in()
        sizes = self.size[self._seen]
        self.one_size = int(sizes[0]) if sizes.size and bool((sizes == sizes[0]).all()) else None
        others = np.maximum(0, self._requests)
        promised = np.maximum(0.0, others * tunables.typical_demand_tokens / self.size - self._used)
        self.room: Floats = self._base - promised
        self.outstanding: Ints = others
        self.trusted[:] = 1.0
        for replica_id in {*self._ledger.replicas(), *self._trust.watched()}:
            row = self._row.get(replica_id)
            if row is not None:
                self._correct(row, replica_id)

    def _fill_in(self) -> None:
        """A replica that has not stepped yet (capacity 0) counts as an empty one of its peers' size.

        Taken literally it would have no room, get no request, and so never step.
        """
        empty = self._seen & (self.capacity <= 0)
        if not empty.any():
            return
        peer = int(np.argmax(np.where(self._seen, self.capacity, -1)))
        size, capacity = int(self.size[peer]), int(self.capacity[peer])
        if capacity <= 0:
            size, capacity = UNKNOWN_BLOCK_TOKENS, UNKNOWN_CAPACITY_BLOCKS
        self.size[empty], self.capacity[empty], self._base[empty] = size, capacity, capacity
        self._used[empty] = self._requests[empty] = 0

    def _correct(self, row: int, replica_id: str) -> None:
        """Room of one replica by what this router has in flight there and thinks of it."""
        ours = self._ledger.count(replica_id)
        known = self._ledger.count_before(replica_id, float(self._taken_s[row]))
        others = max(0, int(self._requests[row]) - known)
        committed = self._ledger.tokens(replica_id) + others * self._tunables.typical_demand_tokens
        promised = max(0.0, committed / int(self.size[row]) - int(self._used[row]))
        room, trust = float(self._base[row]) - promised, self._trust.trust(replica_id)
        self.room[row] = room * trust if room > 0 else room
        self.outstanding[row], self.trusted[row] = ours + others, trust
