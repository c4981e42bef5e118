"""What clients see; a row of the Fleet board."""

from __future__ import annotations

from vtoken.observability.metric import Unit
from vtoken.observability.panels import Row, lines
from vtoken.observability.query import quantile, rate, ratio, series, total

OUTCOME_COLOURS = {"served": "green", "left": "blue", "invalid": "yellow", "refused": "orange", "failed": "red"}


def _missed_share() -> str:
    missed = total(rate("slo_requests_total", result="missed"), "objective")
    return ratio(missed, total(rate("slo_requests_total"), "objective"))


_BUDGET = f"(1 - max by (objective) ({series('slo_target_ratio')}))"
_FAILED = total(rate("requests_total", outcome="failed"))

SERVICE = Row("What clients see", (
    lines("Time to first token", "Of streams. Rises first when the fleet is too small: look at the line and at room.",
          Unit.SECONDS, (ratio(total(rate("ttft_seconds_total")), total(rate("ttft_requests_total"))), "mean"),
          *((quantile(share, "ttft_seconds"), f"{share:.0%}") for share in (0.5, 0.95, 0.99))),
    lines("Time per output token", "Of streams. Rises with large batches, slow copies and preemptions.", Unit.SECONDS,
          (ratio(total(rate("tpot_seconds_total")), total(rate("tpot_requests_total"))), "mean"),
          *((quantile(share, "tpot_seconds"), f"{share:.0%}") for share in (0.5, 0.95, 0.99))),
    lines("Requests by outcome", "Failed is ours, invalid the client's, refused the fleet's size or a key's limit.",
          Unit.COUNT, (total(rate("requests_total"), "outcome"), "{{outcome}} / s"), stacked=True,
          colours={f"{outcome} / s": colour for outcome, colour in OUTCOME_COLOURS.items()}),
    lines("Share of requests that fail", "The error budget is spent by these.", Unit.RATIO,
          (ratio(_FAILED, total(rate("requests_total"))), "failed"), width=12),
    lines("Burn of the error budgets", "1 spends a budget just within its period; the alerts begin at 6.", Unit.COUNT,
          (ratio(_missed_share(), _BUDGET), "{{objective}}"), width=12),
))  # fmt: skip
