"""All alerts and recorded series, by subject."""

from __future__ import annotations

from vtoken.observability.alerts import fleet, gpu, reclamation, service

RECORDINGS = (*reclamation.RECORDINGS, *service.RECORDINGS)
ALERTS = (*reclamation.ALERTS, *service.ALERTS, *fleet.ALERTS, *gpu.ALERTS)
