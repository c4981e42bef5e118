"""Pages that send their readers to a panel, a row or a board name one that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vtoken.observability.boards import BOARDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMED = re.compile(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)")
ELSEWHERE = {"Status: Targets", "Stuck waiting"}
"""A page of Prometheus, and a paragraph."""


def titles():
    """What can be looked for on the boards."""
    boards = [board.title.rpartition(" / ")[2] for board in BOARDS]
    rows = [row for board in BOARDS for row in board.rows]
    return {*boards, *(row.title for row in rows), *(panel.title for row in rows for panel in row.panels)}


@pytest.mark.parametrize("page", ["runbooks.md", "observability.md", "operations.md"])
def test_what_is_to_be_looked_at_is_there(page):
    named = {" ".join(name.split()) for name in NAMED.findall((DOCS / page).read_text(encoding="utf-8"))}
    assert named
    assert named - titles() - ELSEWHERE == set()
