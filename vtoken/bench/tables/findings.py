"""What a result says, in a phrase: the column `found` of the overview."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vtoken.bench.tables.cells import MISSING, dig, number, percent, ratio, span

Values = Mapping[str, Any]


def _medians(values: Values, *path: str) -> list[float | None]:
    """Medians of every mapping on the first level, at `path` below it."""
    return [dig(one, *path, "median") for one in values.values() if isinstance(one, Mapping)]


def _frontier(values: Values) -> str:
    over = [scene["eager"] / int(name.split()[-2]) for name, scene in values.items()]
    speeds = span((scene.get("throughput_over_native") for scene in values.values()), 2)
    return f"{span(over, 1)} x the requests, at {speeds} x the throughput, in {len(values)} scenes"


def _waste(values: Values) -> str:
    runs = [one for policies in values.values() if isinstance(policies, Mapping) for one in policies.values()]
    naive, eager = (span((one[variant]["waste"] for one in runs), 2) for variant in ("naive", "eager"))
    half = span((100 * one["naive"]["half_empty_share"] for one in runs), 0)
    change = [100 * (one["eager"]["blocks_per_request"] / one["naive"]["blocks_per_request"] - 1) for one in runs]
    return f"F {naive} naive, {half} % of blocks at most half full; {eager} eager; blocks {span(change, 1, ' %')}"


def _sla(values: Values) -> str:
    gain = ", ".join(f"{variant} {number(one, 2)} x" for variant, one in values["over_naive"].items())
    return f"over naive: {gain}, within {number(values['level_s'], 2)} s"


def _prefix(values: Values) -> str:
    runs = [one for one in values.values() if isinstance(one, Mapping)]
    points = [100 * abs(one["eager"][rate] - one["naive"][rate]) for one in runs for rate in HIT_RATES]
    blocks = [100 * (one["eager"]["blocks"] / one["naive"]["blocks"] - 1) for one in runs]
    shared = [one["naive"]["shared_blocks"] - one["eager"]["shared_blocks"] for one in runs]
    return (
        f"hit rates up to {number(max(points), 2)} points apart; blocks {span(blocks, 1, ' %')}; up to "
        f"{number(max(shared), 1)} shared blocks fewer"
    )


HIT_RATES = ("hit_rate", "late_hit_rate")


def _identity(values: Values) -> str:
    parts = [one for one in values.values() if isinstance(one, Mapping)]
    return f"{sum(one['identical'] for one in parts):,} of {sum(one['compared'] for one in parts):,}"


def _soak(values: Values) -> str:
    modes = [one for one in values.values() if isinstance(one, Mapping)]
    bad = sum(one[key] for one in modes for key in SOAK_BAD)
    requests, checks = (sum(one[key] for one in modes) for key in ("requests", "checks"))
    return f"{values['minutes']:g} minutes, {requests:,} requests, {checks:,} plans of moves compared, {bad} faults"


SOAK_BAD = ("disagreements", "probes_wrong", "wrong_lengths", "leaked_blocks", "left_tables", "failures")


def _speed(values: Values) -> str:
    contexts = {int(name): one for name, one in values.items() if isinstance(one, Mapping)}
    return "; ".join(f"{span(_medians(one, 'whole'))} x at {context:,}" for context, one in contexts.items())


def _idle(values: Values) -> str:
    shares = [100 * one["substrate_share"] for one in values.values() if "substrate_share" in one]
    ours = [100 * (m - 1) for m in _medians(values, "cpu_per_token_over_native") if m is not None]
    beside = "".join(
        f", {name} {span([100 * (m - 1) for m in _medians(values[key]) if m is not None], 1, ' %')}"
        for key, name in (("connector", "an empty connector"), ("control", "the control"))
        if key in values
    )
    return f"inside {span(shares, 2, ' %')}; CPU seconds {span(ours, 1, ' %')}{beside}"


def _rows(values: Values) -> str:
    return f"{ratio(dig(values, 'used', 'all'))}; over a row in a fresh pool {ratio(dig(values, 'fresh', 'all'))}"


def _reader(values: Values) -> str:
    judged = {name: one for name, one in values.items() if name.startswith("decode") and "scattered" not in name}
    beyond = sum(one["median"] > 4.0 for one in judged.values())
    return f"{span(_medians(judged), 1)} x; {beyond} of {len(judged)} cases beyond 4"


def _copy(values: Values) -> str:
    def of(by: str, whole: bool) -> str:
        return span(
            one["median"] for name, one in (values.get(by) or {}).items() if name.startswith("blocks") is whole
        )  # fmt: skip

    return (
        f"whole blocks {of('bytes', True)} by bytes; single tokens {of('bytes', False)} by bytes, "  # noqa: FBT003
        f"{of('lines', False)} by cache lines, {of('places', False)} by places"  # noqa: FBT003
    )


def _bookkeeping(values: Values) -> str:
    policies = [one for one in values.values() if isinstance(one, Mapping)]
    decision, whole = (
        span((one[key] / 1000 for one in policies), 2, " ms") for key in ("decision_us", "whole_decision_us")
    )
    return f"{decision}; with the scan and the policy's own choice {whole}"


def _scoring(values: Values) -> str:
    found = [
        f"`{name}` {percent(one.get('inside'), 2)}" for name, one in values.items()
        if isinstance(one, Mapping) and name != "control"
    ]  # fmt: skip
    cpu = _medians({name: one for name, one in values.items() if name != "control"}, "cpu")
    return f"inside {', '.join(found)}; CPU seconds {span(cpu, 3)}, the control {ratio(dig(values, 'control', 'cpu'))}"


def _routing(values: Values) -> str:
    found = (number(dig(values, f"replicas_{size}", "decide_p50_us"), 1) for size in (64, 1000))
    return "{} and {} us".format(*found)


def _heartbeats(values: Values) -> str:
    return f"{number(dig(values, 'replicas_1000_batch_8', 'age_p99_s'), 2)} s"


def _pressure(values: Values) -> str:
    preempted = [number(dig(values, "under_pressure", mode, "preemptions")) for mode in ("room", "round_robin")]
    return (
        f"{number(values.get('gain_over_best'), 2)} x the best simple rule; {preempted[0]} preemptions beside "
        f"{preempted[1]}; {number(values.get('share_without_pressure'), 2)} without pressure"
    )


def _quality(values: Values) -> str:
    identity = values.get("identity") or {}
    count = dig(identity, "log_probs")
    same = "identical" if not values.get("faults") else "**not identical**"
    fell = f"; it falls for {len(values['unmonotone'])} lengths" if values.get("unmonotone") else ""
    return f"{same} for {dig(identity, 'policies') or MISSING} policies, {number(count)} log-probabilities{fell}"


def _needles(values: Values) -> str:
    found = values.get("found") or {}
    full, one, head, asked = (
        number(found.get(name)) for name in ("full cache", "h2o, all, 0.5", "h2o, head, 0.5", "question, all, 0.5")
    )
    of = number(values.get("needles"))
    return f"full cache {full} of {of}, the question's own choice {asked}, `h2o` {one}, by head {head}"


def _simulator(values: Values) -> str:
    errors = [abs(one) for one in (dig(values, "measured_run", "error") or {}).values()]
    capacities = "as" if dig(values, "frontier", "holds") else "not as"
    return f"errors up to {percent(max(errors, default=None))}; capacities {capacities} measured"


def _study(values: Values) -> str:
    verdicts = values.get("verdicts") or []
    over, robin = (span(one[key] for one in verdicts) for key in ("over_best", "over_round_robin"))
    words = ", ".join(f"{word} {values[word]}" for word in ("wins", "ties", "loses"))
    return f"{words} of {len(verdicts)} cases; {over} x the best other, {robin} x round robin"


def _sensitivity(values: Values) -> str:
    eager, lazy, best = (number(values.get(key), 3) for key in ("eager_waste", "lazy_waste", "best_lazy_waste"))
    moves = [number(values.get(key)) for key in ("eager_moves", "lazy_moves")]
    near = number(values.get("largest_change_of_waste_near_default_theta_f"), 3)
    return (
        f"F {eager} eager, {lazy} lazy at the default `theta_f`, {best} at its best; moves {moves[0]} and {moves[1]}; "
        f"F changes by up to {near} next to the default `theta_f`"
    )


FOUND: Mapping[str, Callable[[Values], str]] = {
    "frontier": _frontier,
    "waste": _waste,
    "sla": _sla,
    "prefix": _prefix,
    "identity": _identity,
    "soak": _soak,
    "speed": _speed,
    "idle": _idle,
    "rows": _rows,
    "reader": _reader,
    "copy": _copy,
    "bookkeeping": _bookkeeping,
    "scoring": _scoring,
    "routing": _routing,
    "heartbeats": _heartbeats,
    "pressure": _pressure,
    "quality": _quality,
    "needles": _needles,
    "simulate-check": _simulator,
    "simulate-study": _study,
    "simulate-sensitivity": _sensitivity,
}
"""By result id."""
