"""What the demo shows at its end, and its last line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from vtoken.demo.traffic import REQUESTS, Tally
from vtoken.results.outcome import Outcome

ROWS: tuple[tuple[str, str, str], ...] = (
    ("peak blocks in use", "peak_blocks", "{:,}"),
    ("blocks retained per request", "blocks_per_request", "{:.1f}"),
    ("waste F, mean", "waste", "{:.3f}"),
    ("tokens evicted", "tokens_evicted", "{:,}"),
    ("blocks released while decoding", "blocks_released", "{:,}"),
    ("tokens moved", "tokens_moved", "{:,}"),
    ("moves checked byte by byte, failures", "checks", "{:,}"),
    ("preemptions", "preemptions", "{:,}"),
    ("generated tokens per second", "tokens_per_s", "{:.1f}"),
)


def result(measured: Mapping[str, Any], tally: Tally, fleet: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The JSON object of the last line.

    `outputs_*` compare naive with vtoken under the strict reader; `tokens_per_s_vtoken` is that of
    `reader: auto`; `blocks_released` and `tokens_moved` are the fleet's.
    """
    naive, strict, auto = measured["naive"], measured["vtoken-strict"], measured["vtoken"]
    replicas = fleet["replicas"]
    return {
        "replicas": len(replicas),
        "requests": tally.requests,
        "errors": tally.errors,
        "outputs_compared": len(naive["texts"]),
        "outputs_identical": sum(a == b for a, b in zip(naive["texts"], strict["texts"], strict=True)),
        "blocks_released": sum(replica["blocks_released_total"] for replica in replicas),
        "tokens_moved": sum(replica["moves_total"] for replica in replicas),
        "peak_blocks_naive": naive["peak_blocks"],
        "peak_blocks_vtoken": strict["peak_blocks"],
        "waste_naive": round(naive["waste"], 4),
        "waste_vtoken": round(strict["waste"], 4),
        "tokens_per_s_naive": round(naive["tokens_per_s"], 1),
        "tokens_per_s_vtoken": round(auto["tokens_per_s"], 1),
        "tokens_per_s_vtoken_strict": round(strict["tokens_per_s"], 1),
        "seconds": round(seconds, 1),
    }


def show(console: Console, measured: Mapping[str, Any], tally: Tally) -> None:
    """The comparison as a table, and what the clients saw."""
    table = Table(title="16 prompts, float32, the same evictions and block budget")
    table.add_column("")
    for variant in measured:
        reader = "auto" if variant == "vtoken" else "strict"
        table.add_column(f"{variant.removesuffix('-strict')}\nreader: {reader}", justify="right")
    for heading, key, form in ROWS:
        cells = [form.format(values[key]) for values in measured.values()]
        if key == "checks":
            cells = [f"{v['checks']:,}, {v['check_failures']}" for v in measured.values()]
        table.add_row(heading, *cells)
    texts = measured["naive"]["texts"]
    same = [sum(a == b for a, b in zip(texts, values["texts"], strict=True)) for values in measured.values()]
    table.add_row("texts identical to naive", *[f"{count} of {len(texts)}" for count in same])
    console.print(table)
    console.print(f"fleet: {tally.requests} requests, {tally.tokens:,} tokens streamed, {tally.errors} errors")
    if tally.first_error:
        console.print(f"first error: {tally.first_error}", style="red", markup=False)


def outcome(values: Mapping[str, Any], measured: Mapping[str, Any], missed: list[str]) -> Outcome:
    """For a result file: the last line, and the figures of every variant without its texts."""
    compared = {variant: {key: one[key] for key in one if key != "texts"} for variant, one in measured.items()}
    return Outcome("demo", values={**values, "compared": compared}, failures=missed)


def missed_bars(values: Mapping[str, Any]) -> list[str]:
    """The demo's own bars that do not hold, in words."""
    bars = {
        "two replicas": values["replicas"] == 2,
        f"{REQUESTS} requests without an error": values["requests"] >= REQUESTS and values["errors"] == 0,
        "identical texts under the strict reader": values["outputs_identical"] == values["outputs_compared"] >= 16,
        "blocks released while serving": values["blocks_released"] > 0,
        "peak blocks <= 0.75 x naive": values["peak_blocks_vtoken"] <= 0.75 * values["peak_blocks_naive"],
        "waste <= 0.5 x naive": values["waste_vtoken"] <= 0.5 * values["waste_naive"],
    }
    return [bar for bar, holds in bars.items() if not holds]
