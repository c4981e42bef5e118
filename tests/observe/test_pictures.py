"""The pictures of the boards, and the npm project that draws them; drawing itself is no test (`make screenshots`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vtoken.observability.boards import BOARDS

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = 300_000


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_board_has_a_small_picture_that_the_pages_show(board):
    picture = ROOT / "docs" / "img" / f"{board.uid}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < LARGEST_BYTES
    assert f"docs/img/{picture.name}" in (ROOT / "README.md").read_text()
    assert f"img/{picture.name}" in (ROOT / "docs" / "observability.md").read_text()


def test_the_npm_project_is_pinned_and_is_no_board_to_grafana():
    """Grafana takes every JSON file below dashboards/ for a board."""
    project = ROOT / "deploy" / "grafana" / "screenshots"
    wanted = json.loads((project / "package.json").read_text())["dependencies"]
    locked = json.loads((project / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    below = {path.name for path in (ROOT / "dashboards").rglob("*.json")}
    assert below == {f"{board.uid}.json" for board in BOARDS}
