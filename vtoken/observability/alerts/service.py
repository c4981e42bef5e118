"""Are promises to clients kept? Burn rates of error budgets over two windows each, after Google's SRE workbook.

A burn rate of 1 spends the budget (1 - target) just within its period. A long window says that it matters, a short one
that it goes on: an alert wants both, so it neither fires for a moment's trouble nor long after it is over. Few
requests say little: there must be LEAST_MISSED that an objective has missed.
"""

from __future__ import annotations

from vtoken.observability.rules import APPLICATION, Alert, Recording, all_of, more, per_second, top

BY = (*APPLICATION, "objective")
LEAST_MISSED = 10


def _burn(window: str) -> Recording:
    """What share of the requests an objective has missed in a window, in shares that it may miss."""
    missed = per_second("slo_requests_total", window, BY, result="missed")
    asked = per_second("slo_requests_total", window, BY)
    budget = f"(1 - {top(all_of('slo_target_ratio'), BY)})"
    return Recording(f"vtoken:slo_burn:rate{window}", f"{missed} / ({asked} > 0) / {budget}")


RECORDINGS = tuple(map(_burn, ("5m", "30m", "1h", "6h")))


def _lasting(short: str, long: str) -> str:
    """The lower burn rate of two windows, and 0 while the longer one has hardly missed any."""
    one, other = f"vtoken:slo_burn:rate{short}", f"vtoken:slo_burn:rate{long}"
    enough = f"({more('slo_requests_total', long, BY, result='missed')} >= bool {LEAST_MISSED})"
    return f"({one} < {other} or {other} <= {one}) * {enough}"


_SAYS = (
    "{{ $labels.application }} misses its objective {{ $labels.objective }}: the error budget burns {{ $value }} times "
)

ALERTS = (
    Alert("SloBurnsFast", _lasting("5m", "1h"), "> 14.4", "1m", "critical", _SAYS + "too fast, for an hour"),
    Alert("SloBurnsSlowly", _lasting("30m", "6h"), "> 6", "5m", "warning", _SAYS + "too fast, for six hours"),
)  # fmt: skip
