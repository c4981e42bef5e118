"""`vtoken explain REQUEST`: what was decided about a request and why, from `/v1/vtoken/requests/REQUEST`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from vtoken.core.history import from_mapping
from vtoken.serving.limits import check_request_id
from vtoken.serving.status import StatusError, add_address, ask, client_of

EXIT_UNKNOWN = 1

TIMEOUT_S = 30.0
"""Above the server's own limit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("request", metavar="REQUEST", help="`id` of an answer, or an engine's own id from its log")
    add_address(parser)
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the record of a request; 1 and a line on standard error if there is none.

    Raises:
        StatusError: the server does not answer, refuses, or speaks another version.
    """
    refusal = check_request_id(arguments.request)
    if refusal is not None:
        raise StatusError(refusal.message)
    try:
        with client_of(arguments.address, TIMEOUT_S) as client:
            answer = ask(client, f"/v1/vtoken/requests/{arguments.request}", "requests", dict)
    except StatusError as error:
        if error.code != "request_not_found":
            raise
        print(f"vtoken: {error}", file=sys.stderr)
        return EXIT_UNKNOWN
    print(json.dumps(answer, indent=2) if arguments.json else render(answer))
    return 0


def render(answer: Mapping[str, Any]) -> str:
    """A line per decision, under the engine's ids.

    Raises:
        StatusError: entries of another version.
    """
    lines = []
    try:
        for engine_id, entries in answer["requests"].items():
            lines.append(f"{engine_id} on replica {answer['replica_id']}")
            lines += [f"  {from_mapping(entry)}" for entry in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StatusError(f"the record is of another version of vToken ({error!r}); print it with --json") from None
    return "\n".join(lines)
