"""Tables of what was measured on parts alone: kernels, copies, tables, routers."""

from __future__ import annotations

from collections.abc import Mapping

from vtoken.bench.tables.cells import code, dig, median, number, ratio, span, table_of, values_of
from vtoken.results.pages import Results


def rows(results: Results) -> str:
    """Attention over relocated rows."""

    def line(kind: str, what: str) -> list[str]:
        cases = dict(dig(values_of(results, "rows"), kind) or {})
        every = cases.pop("all", None)
        largest = max(cases.values(), key=lambda one: float(one["median"]), default=None)
        return [what, ratio(every), ratio(largest)]

    lines = [
        line("used", "in a pool that has served for a while"),
        line("fresh", "in a fresh pool, blocks one after another"),
    ]
    return table_of(results, "rows", ["native row", "median over all pairs", "largest case"], lines)


def reader(results: Results) -> str:
    """The strict reader over the native kernel, by layout."""
    values = values_of(results, "reader")

    def over(kind: str, layout: str) -> str:
        found = [one for name, one in values.items() if name.startswith(kind) and name.endswith(layout)]
        return span((dig(one, "median") for one in found), 1)

    lines = [[layout, over("decode", layout), over("chunk", layout)] for layout in ("clean", "holey", "scattered")]
    return table_of(results, "reader", ["layout of the live tokens", "decoding", "chunk of a prompt"], lines)


MOVES = {
    "blocks": "whole blocks", "compact": "every second token, packed", "fill": "tail into holes",
    "scatter": "anywhere to anywhere",
}  # fmt: skip


def copies(results: Results) -> str:
    """The copy engine over a plain copy."""
    values = values_of(results, "copy")
    lines = [
        [what, *(median(dig(values, by, f"{kind}-{dtype}"), 2) for dtype in ("bfloat16", "float32") for by in BY)]
        for kind, what in MOVES.items()
    ]
    return table_of(
        results, "copy", ["moves", "bfloat16: bytes", "lines", "places", "float32: bytes", "lines", "places"], lines
    )


BY = ("bytes", "lines", "places")


def bookkeeping(results: Results) -> str:
    """Q9, by requests and policy."""
    policies = {name: one for name, one in values_of(results, "bookkeeping").items() if isinstance(one, Mapping)}
    tracked = next(iter(policies.values()), {}).get("decision_us_by_tracked", {})
    lines = [
        [f"{int(count):,}", code(policy), *(number(dig(one, f"{part}_us_by_tracked", count), 1) for part in PARTS)]
        for count in tracked
        for policy, one in policies.items()
    ]
    head = [
        "requests", "policy", "evict + plan + apply", "with the scan of all rows and the choice", "of it the policy",
    ]  # fmt: skip
    return table_of(results, "bookkeeping", head, lines)


PARTS = ("decision", "whole_decision", "policy")


def routing(results: Results) -> str:
    """A routing decision, by replicas."""
    lines = [
        [f"{int(name.removeprefix('replicas_')):,}", *(number(one.get(f"{key}_p50_us"), 1) for key in ROUTING)]
        for name, one in values_of(results, "routing").items()
        if name.startswith("replicas_")
    ]
    head = ["replicas", "decide", "with a known beginning", "commit", "end of a request", "adopt a view"]
    return table_of(results, "routing", head, lines)


ROUTING = ("decide", "decide_affine", "commit", "end", "adopt")


def heartbeats(results: Results) -> str:
    """Reports of a large fleet, by how many come in a call."""
    values = values_of(results, "heartbeats")
    batches = [int(name.removeprefix("most_batch_")) for name in values if name.startswith("most_batch_")]
    sizes = dict.fromkeys(name.split("_")[1] for name in values if name.startswith("replicas_"))
    lines = [
        [
            f"{int(size):,}", str(batch), number(values[f"most_batch_{batch}"]),
            number(dig(values, f"replicas_{size}_batch_{batch}", "heartbeats_per_s")),
            number(dig(values, f"replicas_{size}_batch_{batch}", "age_p50_s"), 2),
            number(dig(values, f"replicas_{size}_batch_{batch}", "age_p99_s"), 2),
        ]
        for size in sizes
        for batch in batches
    ]  # fmt: skip
    head = [
        "replicas", "heartbeats in a call", "most per second", "taken per second", "age at decision, s: median",
        "99th percentile",
    ]  # fmt: skip
    return table_of(results, "heartbeats", head, lines)


def pressure(results: Results) -> str:
    """Routers on two real replicas, by rule."""
    values = values_of(results, "pressure")
    lines = [
        [what, code(mode), number(one.get("good_per_s"), 3), number(one.get("preemptions")), number(one.get("failed"))]
        for key, what in (("under_pressure", "memory short"), ("without_pressure", "memory ample"))
        for mode, one in (dig(values, key) or {}).items()
    ]
    head = ["load", "rule", "good requests per second", "preemptions", "failed"]
    return table_of(results, "pressure", head, lines)
