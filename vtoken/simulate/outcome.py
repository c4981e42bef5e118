"""What a run is worth: goodput and latency under a service level, as numbers, CSV and, with matplotlib, a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.results.files import write_csv
from vtoken.simulate.fleet import SERIES, Outcome
from vtoken.simulate.state import DONE, FAILED, REFUSED


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a client was promised: seconds to the first token, seconds per token afterwards (mean of the request)."""

    first_token_s: float = 5.0
    token_s: float = 0.1


def summary(outcome: Outcome, level: ServiceLevel) -> dict[str, float]:
    """Goodput: output tokens of requests that kept the service level, per second of arrivals."""
    requests = outcome.requests
    done = requests["status"] == DONE
    first = np.where(done, requests["first_s"] - outcome.arrival_s, np.inf)
    token = np.where(done, (requests["end_s"] - requests["first_s"]) / np.maximum(requests["output"] - 1, 1), np.inf)
    good = (first <= level.first_token_s) & (token <= level.token_s)
    span = max(float(outcome.arrival_s[-1] - outcome.arrival_s[0]), 1e-9)
    return {
        "goodput_tokens_per_s": float(requests["output"][good].sum()) / span,
        "good_share": float(good.mean()),
        "output_tokens_per_s": float(requests["generated"].sum() / max(outcome.seconds, 1e-9)),
        "done": int(done.sum()),
        "failed": int((requests["status"] == FAILED).sum()),
        "refused": int((requests["status"] == REFUSED).sum()),
        "first_token_p50_s": _quantile(first[done], 50),
        "first_token_p99_s": _quantile(first[done], 99),
        "token_p99_s": _quantile(token[done], 99),
        "preemptions": int(requests["preempted"].sum()),
        "cached_share": float(requests["cached"].sum() / max(requests["prompt"].sum(), 1)),
        "seconds": outcome.seconds,
    }


def _quantile(values: Any, q: float) -> float:
    return float(np.percentile(values, q)) if len(values) else float("nan")


def write_series(path: Path, outcome: Outcome) -> None:
    """The time series as CSV."""
    write_csv(path, [dict(zip(SERIES, sample, strict=True)) for sample in outcome.series.tolist()])


def plot_series(path: Path, outcome: Outcome) -> bool:
    """The time series as a picture; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 6))
    upper, lower = figure.subplots(2, 1, sharex=True)
    columns = dict(zip(SERIES, outcome.series.T, strict=True))
    for name in ("running", "waiting"):
        upper.plot(columns["second"], columns[name], label=name)
    for name in ("kv_use", "fullest_kv_use"):
        lower.plot(columns["second"], columns[name], label=name)
    upper.set_ylabel("requests")
    lower.set_ylabel("share of the pool")
    lower.set_xlabel("seconds")
    for axes in (upper, lower):
        axes.legend()
    figure.savefig(path)
    return True
