"""`vtoken status`: the fleet as a live table, from `/v1/vtoken/fleet`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vtoken.core.errors import VTokenError

KEY_VARIABLE = "VTOKEN_API_KEY"
"""Environment variable with the key that `vtoken`'s own commands send."""

LEVEL_STYLE = {"open": "green", "throttled": "yellow", "closed": "red"}

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("F", "waste_ratio", "{:.3f}"),
    ("live tokens", "live_tokens", "{}"),
    ("free", "free_blocks", "{}"),
    ("reserved", "reserved_blocks", "{}"),
    ("private", "private_blocks", "{}"),
    ("shared", "shared_blocks", "{}"),
    ("reclaimable", "reclaimable_blocks", "{}"),
    ("released", "blocks_released_total", "{}"),
    ("moved", "moves_total", "{}"),
    ("running", "running_requests", "{}"),
    ("waiting", "waiting_requests", "{}"),
    ("preempted", "preemptions_total", "{}"),
)
"""Heading, key in the fleet's JSON, format."""

NARROW = frozenset({"F", "free", "reserved", "released", "running", "waiting"})
WIDE_AT = 150
"""Below this many characters a terminal gets the NARROW columns only; what is no terminal gets all of them."""


class StatusError(VTokenError):
    """A server can't be asked, or refuses; the message says where and why.

    Attributes:
        code: of the server's error object, or None.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    add_address(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print one table and end")


def add_address(parser: argparse.ArgumentParser) -> None:
    """Declare `--address`, the same for every subcommand that asks a server."""
    parser.add_argument("--address", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Show the table until Ctrl-C, or once.

    Raises:
        StatusError: the server does not answer at the first look.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE_AT)
    wide = console.width >= WIDE_AT
    with client_of(arguments.address, timeout_s=5.0) as client:
        first = render(fetch(client), wide)
        if arguments.once:
            console.print(first)
            return 0
        with Live(first, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(max(0.1, arguments.interval))
                live.update(_next(client, wide), refresh=True)


def client_of(address: str, timeout_s: float) -> httpx.Client:
    """A client of a server, with the API key of the environment if there is one."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=address, timeout=timeout_s, headers=headers)


def fetch(client: httpx.Client) -> dict[str, Any]:
    """The fleet's JSON.

    Raises:
        StatusError: see `ask`.
    """
    return ask(client, "/v1/vtoken/fleet", "replicas", list)


def ask(client: httpx.Client, path: str, key: str, kind: type) -> dict[str, Any]:
    """The JSON object at a path of a vToken server.

    Args:
        client: of the server.
        path: below its address.
        key: what the object must have; a stranger's answer is told by it.
        kind: type of the value there.

    Raises:
        StatusError: no answer, an error object, or a stranger's answer.
    """
    try:
        response = client.get(path)
        body = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise StatusError(f"no fleet at {client.base_url}: {error}. Name the server with --address.") from None
    if isinstance(body, dict) and isinstance(body.get(key), kind):
        return body
    answered = f"{client.base_url} answered {response.status_code}"
    refusal = body.get("error") if isinstance(body, dict) else None
    if isinstance(refusal, dict) and isinstance(refusal.get("message"), str):
        when = f" Try again in {wait_s} s." if (wait_s := response.headers.get("retry-after")) else ""
        raise StatusError(f"{answered}: {refusal['message'][:500]}{when}", refusal.get("code"))
    raise StatusError(f"{answered} {str(body)[:200]}; is it a vToken server?")


def _next(client: httpx.Client, wide: bool) -> RenderableType:
    try:
        return render(fetch(client), wide)
    except StatusError as error:
        return Text(str(error), style="red")


def render(fleet: Mapping[str, Any], wide: bool = True) -> RenderableType:
    """The table of a fleet, and a line about what the controller rejected."""
    replicas = fleet["replicas"]
    table = Table(title=f"{len(replicas)} of {fleet.get('wanted_replicas', '?')} replicas")
    for heading in ("replica", "level", "age"):
        table.add_column(heading)
    columns = [column for column in COLUMNS if wide or column[0] in NARROW]
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for replica in replicas:
        table.add_row(*_row(replica, columns))
    rejected = {key: count for key, count in fleet.get("heartbeats_rejected_total", {}).items() if count}
    return Group(table, Text(f"heartbeats rejected: {rejected}", style="yellow")) if rejected else table


def _row(replica: Mapping[str, Any], columns: Sequence[tuple[str, str, str]]) -> list[RenderableType]:
    level = "draining" if replica.get("draining") else str(replica.get("level", "?"))
    head: list[RenderableType] = [
        str(replica.get("replica_id", "?")),
        Text(level, style=LEVEL_STYLE.get(level, "")),
        f"{float(replica.get('age_s', 0.0)):.1f} s",
    ]
    return head + [form.format(replica.get(key, 0)) for _, key, form in columns]
