"""Bring boards, data source and alerts to a Grafana server: read, compare, write only what differs.

    folder ──► data source ──► boards ──► alert group ──► (--prune) boards of ours that are no more

A second push writes nothing. A push that was interrupted is finished by the next one: every step looks for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from vtoken.observability.grafana import PROVENANCE, check_uid
from vtoken.observability.grafana_alerts import DATASOURCE_UID, FOLDER_TITLE, FOLDER_UID, GROUP
from vtoken.observability.grafana_json import TAG

SERVER_FIELDS = frozenset({"id", "version"})
"""Of a board: chosen by the server."""


class Server(Protocol):
    """What a push needs of Grafana; see vtoken.observability.grafana.Grafana."""

    def get(self, path: str) -> Any:
        """The JSON at a path, None where there is nothing."""
        ...

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """Change something."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What should be there.

    Attributes:
        boards: dashboard models.
        alerts: body of the rule group, or None for none.
        prometheus_url: of the data source, as Grafana's server reaches it; None leaves the data source alone.
    """

    boards: Sequence[Mapping[str, Any]]
    alerts: Mapping[str, Any] | None
    prometheus_url: str | None


@dataclass(frozen=True, slots=True)
class Write:
    """One difference, and what removes it."""

    what: str
    do: Callable[[], Any]


def push(server: Server, wanted: Wanted, *, prune: bool, dry_run: bool) -> Iterator[str]:
    """Say, and unless `dry_run` remove, every difference; in the order of what depends on what.

    Raises:
        GrafanaError: the server refuses; what was written before stays.
    """
    for board in wanted.boards:
        check_uid(str(board.get("uid", "")))
    for step in (_folder, _datasource, _boards, _alerts, _strangers if prune else _nothing):
        for write in step(server, wanted):
            if not dry_run:
                write.do()
            yield write.what


def _nothing(_server: Server, _wanted: Wanted) -> Iterator[Write]:
    return iter(())


def _folder(server: Server, _wanted: Wanted) -> Iterator[Write]:
    if server.get(f"/folders/{FOLDER_UID}") is None:
        body = {"uid": FOLDER_UID, "title": FOLDER_TITLE}
        yield Write(f"create folder {FOLDER_UID}", partial(server.send, "POST", "/folders", body))


def _datasource(server: Server, wanted: Wanted) -> Iterator[Write]:
    if wanted.prometheus_url is None:
        return
    body = {
        "uid": DATASOURCE_UID, "name": "vToken", "type": "prometheus", "access": "proxy", "url": wanted.prometheus_url,
        "jsonData": {"httpMethod": "POST", "timeInterval": "5s"},
    }  # fmt: skip
    path = f"/datasources/uid/{DATASOURCE_UID}"
    found = server.get(path)
    if found is None:
        yield Write(f"create data source {DATASOURCE_UID}", partial(server.send, "POST", "/datasources", body))
    elif not _holds(found, body):
        yield Write(f"update data source {DATASOURCE_UID}", partial(server.send, "PUT", path, body))


def _boards(server: Server, wanted: Wanted) -> Iterator[Write]:
    for board in wanted.boards:
        found = server.get(f"/dashboards/uid/{board['uid']}")
        model = None if found is None else found.get("dashboard")
        if model is None or not _same_board(model, board) or found.get("meta", {}).get("folderUid") != FOLDER_UID:
            body = {"dashboard": {**board, "id": None}, "folderUid": FOLDER_UID, "overwrite": True}
            verb = "create" if model is None else "update"
            yield Write(f"{verb} board {board['uid']}", partial(server.send, "POST", "/dashboards/db", body))


def _alerts(server: Server, wanted: Wanted) -> Iterator[Write]:
    if wanted.alerts is None:
        return
    path = f"/v1/provisioning/folder/{FOLDER_UID}/rule-groups/{GROUP}"
    found = server.get(path)
    if found is None or not _holds(found, wanted.alerts):
        yield Write(f"write alert group {GROUP}", partial(server.send, "PUT", path, wanted.alerts, PROVENANCE))


def _strangers(server: Server, wanted: Wanted) -> Iterator[Write]:
    """Boards in our folder, with our tag, that are not among the wanted ones."""
    uids = {board["uid"] for board in wanted.boards}
    for found in server.get(f"/search?type=dash-db&tag={TAG}&folderUIDs={FOLDER_UID}") or []:
        if found["uid"] not in uids and TAG in found.get("tags", []):
            uid = check_uid(found["uid"])
            yield Write(f"delete board {uid}", partial(server.send, "DELETE", f"/dashboards/uid/{uid}"))


def _same_board(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    strip = SERVER_FIELDS
    return {k: v for k, v in found.items() if k not in strip} == {k: v for k, v in wanted.items() if k not in strip}


def _holds(found: Any, wanted: Any) -> bool:
    """Whether all that is wanted is in what was found; a server adds fields of its own, also inside lists."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(k in found and _holds(found[k], v) for k, v in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_holds, found, wanted))
    return bool(found == wanted)
