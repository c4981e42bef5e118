"""Everything that is generated, as path and text; written, or compared with what lies there."""

from __future__ import annotations

from pathlib import Path

from vtoken.observability.alerts import ALERTS, RECORDINGS
from vtoken.observability.boards import BOARDS
from vtoken.observability.grafana_alerts import provisioning_text
from vtoken.observability.grafana_json import board_text
from vtoken.observability.prometheus import config_text
from vtoken.observability.reference import reference_text
from vtoken.observability.rules import rules_text

DASHBOARDS = Path("dashboards")
RULES = Path("deploy/prometheus/rules.yml")
CONFIG = Path("deploy/prometheus/prometheus.yml")
GRAFANA_ALERTS = Path("deploy/grafana/provisioning/alerting/vtoken.yml")
REFERENCE = Path("docs/metrics.md")


def generated() -> dict[Path, str]:
    """Path below the repository's top -> text."""
    boards = {DASHBOARDS / f"{board.uid}.json": board_text(board) for board in BOARDS}
    return {
        **boards,
        RULES: rules_text(RECORDINGS, ALERTS),
        CONFIG: config_text(),
        GRAFANA_ALERTS: provisioning_text(),
        REFERENCE: reference_text(),
    }


def stale(root: Path) -> list[Path]:
    """Files that are missing, differ from what would be generated, or belong to no board any more."""
    wanted = generated()
    wrong = [path for path, text in wanted.items() if not _holds(root / path, text)]
    strangers = [path.relative_to(root) for path in (root / DASHBOARDS).glob("*.json")]
    return wrong + [path for path in strangers if path not in wanted]


def write(root: Path) -> list[Path]:
    """Write what is stale and remove what belongs to no board; returns what has changed."""
    wanted, changed = generated(), stale(root)
    for path in changed:
        if path not in wanted:
            (root / path).unlink()
            continue
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(wanted[path], encoding="utf-8")
    return changed


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text
