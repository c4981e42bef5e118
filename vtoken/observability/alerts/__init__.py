"""All alerts and recorded series, by subject."""

from __future__ import annotations

from vtoken.observability.alerts import fleet, gpu, reclamation

RECORDINGS = reclamation.RECORDINGS
ALERTS = (*reclamation.ALERTS, *fleet.ALERTS, *gpu.ALERTS)
