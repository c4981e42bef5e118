"""PromQL in pieces: selectors that only know catalogue metrics, rates, guarded ratios.

waste = series("waste_ratio")                    ray_vtoken_waste_ratio{application=~"$application",...}
ratio(rate("moves_total"), rate("copies_total")) nothing, and not NaN, while nothing is copied
"""

from __future__ import annotations

import re

from vtoken.observability.catalogue import BY_NAME

VARIABLES = ("cluster", "application", "deployment", "replica", "gpu")
"""Dashboard variables that are labels too. `cluster` comes from the scrape configuration and may be missing."""

WINDOW = "$__rate_interval"


class NoneOf(str):
    """Instead of a label's value: a regular expression that it does not match."""

    __slots__ = ()


def series(name: str, /, *, within: tuple[str, ...] = VARIABLES, **own: str) -> str:
    """A catalogue metric, narrowed by those variables that are labels of it, and by `label="value"` for `own`
    (`label!~"value"` for NoneOf).

    Raises:
        KeyError: not in the catalogue.
        ValueError: not one of its labels.
    """
    metric = BY_NAME[name]
    for label in own:
        if label not in metric.all_labels:
            raise ValueError(f"{name} has no label {label}")
    labels = ("cluster", *metric.all_labels)
    matchers = [f'{label}=~"${label}"' for label in within if label in labels and label not in own]
    matchers += [f'{label}{"!~" if isinstance(value, NoneOf) else "="}"{value}"' for label, value in own.items()]
    return f"{metric.exported}{{{','.join(matchers)}}}" if matchers else metric.exported


def rate(name: str, window: str = WINDOW, **own: str) -> str:
    """Increase per second of a counter.

    Raises:
        ValueError: not a counter.
    """
    if not BY_NAME[name].kind.rises:
        raise ValueError(f"{name} is no counter")
    return f"rate({series(name, within=VARIABLES, **own)}[{window}])"


def total(expression: str, *by: str) -> str:
    """Sum, by labels if there are any."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def ratio(numerator: str, denominator: str) -> str:
    """Their quotient; no sample where the denominator is zero."""
    return f"{numerator} / ({denominator} > 0)"


def quantile(share: float, name: str, *by: str, **own: str) -> str:
    """What this share of the values of a histogram does not exceed, as far as its bounds tell; by labels.

    Raises:
        KeyError: there is no such histogram.
    """
    return f"histogram_quantile({share}, {total(rate(f'{name}_bucket', **own), 'le', *by)})"


def rise(name: str, window: str = "$__range", **own: str) -> str:
    """Increase of a counter over a window; by default over all that is shown."""
    return rate(name, window, **own).replace("rate(", "increase(", 1)


def filled(expression: str, rate_window: str, shown: str) -> str:
    """As Grafana hands it to Prometheus: with both durations, and every dashboard variable at All."""
    expression = expression.replace("$__rate_interval", rate_window).replace("$__range", shown)
    return re.sub(r'=~"\$\w+"', '=~".*"', expression)
