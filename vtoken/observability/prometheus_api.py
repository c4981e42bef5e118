"""Questions to a Prometheus, through its HTTP API."""

from __future__ import annotations

from typing import Any

import httpx

from vtoken.core.errors import VTokenError

TIMEOUT_S = 30.0


class PrometheusError(VTokenError):
    """Prometheus is not installed, does not start, can't be reached or refuses; the message says which, and why."""


class Prometheus:
    """A Prometheus that somebody runs.

    Args:
        url: where it listens.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # One client, because making one costs more than asking; no connection outlives its answer.
        self._http = httpx.Client(timeout=TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=0))

    def query(self, expression: str, at_s: int | None = None) -> list[dict[str, Any]]:
        """Samples of an instant query: `metric` and `value` of each series.

        Args:
            expression: PromQL.
            at_s: seconds of the epoch; None is now.

        Raises:
            PrometheusError: Prometheus can't be reached, or refuses.
        """
        when = {} if at_s is None else {"time": str(at_s)}
        return list(self._get("/api/v1/query", query=expression, **when)["result"])

    def query_range(self, expression: str, start_s: int, end_s: int, step_s: int) -> list[dict[str, Any]]:
        """Samples from start to end, one per step: `metric` and `values` of each series. Times as in `query`.

        Raises:
            PrometheusError: Prometheus can't be reached, or refuses.
        """
        span = {"start": str(start_s), "end": str(end_s), "step": str(step_s)}
        return list(self._get("/api/v1/query_range", query=expression, **span)["result"])

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        try:
            body = self._http.get(self.url + path, params=parameters).json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise PrometheusError(f"no Prometheus answers at {self.url} ({type(error).__name__}: {error})") from None
        if not isinstance(body, dict) or body.get("status") != "success":
            reason = body.get("error") if isinstance(body, dict) else "this is no answer of a Prometheus"
            raise PrometheusError(f"Prometheus refuses {parameters}: {reason}")
        return dict(body["data"])
