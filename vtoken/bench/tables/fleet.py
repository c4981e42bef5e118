"""Tables of fleets: drills, and the simulator beside measurements; and those of the README."""

from __future__ import annotations

from collections.abc import Mapping

from vtoken.bench.tables.cells import (
    MISSING,
    absent,
    bar,
    code,
    command_of,
    dig,
    number,
    percent,
    table_of,
    values_of,
)  # fmt: skip
from vtoken.results.pages import Results, markdown

DRILL = "drill-"


def drills(results: Results) -> str:
    """Every drill that was kept: whether it passed, and what it counted."""
    found = {name: result for name, result in results.items() if name.startswith(DRILL)}
    if not found:
        return absent(f"{DRILL}NAME")
    rows = [
        [code(command_of(name)), bar(result), "; ".join(_counts(result.values)), result.date]
        for name, result in found.items()
    ]
    return markdown(["drill", "bars", "found", "date"], rows)


def _counts(values: Mapping[str, object]) -> list[str]:
    """Plain numbers, and sentences of what failed."""
    shown = [f"{name.replace('_', ' ')} {value}" for name, value in values.items() if isinstance(value, int | float)]
    failures = values.get("failures")
    return [*shown, *(f"**{failure}**" for failure in (failures if isinstance(failures, list) else []))]


RUN = {
    "makespan_s": ("makespan, s", 1), "kv_use": ("mean KV use", 3), "peak_running": ("most requests running", 0),
    "output_tokens_per_s": ("output tokens per second", 0), "first_token_s": ("mean time to first token, s", 1),
    "token_s": ("mean time per token, s", 4), "latency_s": ("mean latency, s", 1),
}  # fmt: skip
"""What is compared, and digits shown."""


def simulator(results: Results) -> str:
    """The measured run beside the simulated one."""
    run = dig(values_of(results, "simulate-check"), "measured_run")
    rows = [
        [
            what, number(dig(run, "measured", key), digits), number(dig(run, "simulated", key), digits),
            percent(dig(run, "error", key)),
        ]
        for key, (what, digits) in RUN.items() if dig(run, "measured", key) is not None
    ]  # fmt: skip
    return table_of(results, "simulate-check", ["", "measured", "simulated", "error"], rows)


VARIANTS = ("native", "naive", "lazy", "eager")


def capacities(results: Results) -> str:
    """Requests that a pool holds, by token tables and by the fleet's engine."""
    scenes = dig(values_of(results, "simulate-check"), "frontier") or {}
    tables, engines = (scenes.get(key) or {} for key in ("token_tables", "fleet_engine"))
    rows = [
        [code(scene), *(_both(found.get(variant), dig(engines, scene, variant)) for variant in VARIANTS)]
        for scene, found in tables.items()
    ]
    return table_of(results, "simulate-check", ["scene", *VARIANTS], rows)


def _both(tables: int | None, engine: int | None) -> str:
    """One number where both agree."""
    if tables is None:
        return ""
    return str(tables) if tables == engine else f"{tables} (engine {engine})"


ROUTERS = {
    "over_best": "over it", "over_round_robin": "over round robin", "over_best_gated": "over the best behind our gate",
    "ungated_over_best": "our routing alone over the best", "of_oracle": "of the oracle",
}  # fmt: skip
"""Ratios of goodput that are shown."""


def routers(results: Results) -> str:
    """Our ingress beside the best other router, by case."""
    rows = [
        [
            one["case"], str(one["replicas"]), number(one["goodput"]),
            f"{number(one['best_goodput'])} {code(one['best'])}",
            *(number(one.get(key), 2) for key in ROUTERS),
            f"{percent(one.get('good_share'), 0)} / {percent(one.get('best_good_share'), 0)}",
            f"{number(one['preemptions'])} / {number(one['best_preemptions'])}", one["verdict"],
        ]
        for one in values_of(results, "simulate-study").get("verdicts") or []
    ]  # fmt: skip
    head = [
        "case", "replicas", "ours", "best other", *ROUTERS.values(), "within the service level, ours / other",
        "preemptions, ours / other", "",
    ]  # fmt: skip
    return table_of(results, "simulate-study", head, rows)


def sensitivity(results: Results) -> str:
    """F by `theta_f` and share kept, under lazy relocation; in brackets moves per freed block."""
    points = values_of(results, "simulate-sensitivity").get("points") or []
    cells = {(one["theta_f"], one["keep_ratio"]): one for one in points if one["surface"] == "theta_f"}
    ratios = sorted({ratio for _, ratio in cells})
    rows = [
        [f"{theta:g}", *(_point(cells[theta, ratio]) for ratio in ratios)]
        for theta in sorted({theta for theta, _ in cells})
    ]
    return table_of(results, "simulate-sensitivity", ["`theta_f`", *(f"{ratio:g} kept" for ratio in ratios)], rows)


def settings(results: Results) -> str:
    """F, blocks and moves by block size, interval and headroom."""
    points = values_of(results, "simulate-sensitivity").get("points") or []
    rows = [
        [
            code(f"{one['surface']}: {one[one['surface']]}"), one["relocation"], str(one["requests"]),
            number(one["waste"], 3), number(one["blocks_per_request"], 1), number(one["moves_per_freed_block"], 1),
        ]
        for one in points if one["surface"] != "theta_f"
    ]  # fmt: skip
    head = ["setting", "relocation", "requests", "mean F", "blocks per request", "moves per freed block"]
    return table_of(results, "simulate-sensitivity", head, rows)


def _point(one: Mapping[str, float]) -> str:
    return f"{number(one['waste'], 3)} ({number(one['moves_per_freed_block'], 1)})"


# ---- README ---------------------------------------------------------------------------------------------------------


def readme(results: Results) -> str:
    """What a newcomer wants to know: the demo's figures, and the capacity."""
    head = ["what", "machine", "naive", "vtoken", "how to repeat"]
    return markdown(head, [*_demo(results), *_capacity(results)])


def _demo(results: Results) -> list[list[str]]:
    if "demo" not in results:
        return []
    result = results["demo"]
    naive, strict, auto = (result.values["compared"][name] for name in ("naive", "vtoken-strict", "vtoken"))
    share = strict["peak_blocks"] / naive["peak_blocks"]
    returned, moved = ([f"{one[key]:,}" for one in (naive, strict)] for key in ("blocks_released", "tokens_moved"))
    moved[1] += f" (of {strict['tokens_evicted']:,} evicted)"
    speed = auto["tokens_per_s"] / naive["tokens_per_s"]
    same = f"{result.values['outputs_identical']} of {result.values['outputs_compared']}"
    rows = [
        [
            "peak blocks in use, 16 chat prompts + 224 tokens each, Random to 96 live tokens, float32",
            str(naive["peak_blocks"]), f"{strict['peak_blocks']} ({share:.2f} x)",
        ],
        [
            "blocks held per request at that peak", f"{naive['blocks_per_request']:.1f}",
            f"{strict['blocks_per_request']:.1f}",
        ],
        ["F, mean over the steps after the first eviction", f"{naive['waste']:.3f}", f"{strict['waste']:.3f}"],
        ["blocks returned while decoding", *returned],
        ["tokens moved", *moved],
        ["texts identical to naive, `reader: strict`", "-", same],
        [
            "generated tokens per second, `reader: auto`, over naive", "1",
            f"{speed:.2f}; one run varies by 20 %, and at 300-token contexts attention is a small part of a step",
        ],
    ]  # fmt: skip
    machines = [result.machine, *["the same run"] * (len(rows) - 1)]
    return [[what, machine, *found, "`make demo`"] for machine, (what, *found) in zip(machines, rows, strict=True)]


def _capacity(results: Results) -> list[list[str]]:
    name = "random, cache off, 5 unevicted"
    scene = values_of(results, "frontier").get(name)
    if scene is None:
        return []
    what = (
        "requests of 1,000 tokens that decode together without a preemption, in a pool for 5, Random to 480 tokens, "
        "bfloat16"
    )
    over = number(scene.get("throughput_over_native"), 2)
    found = f"{scene['eager']}, at {over} x the tokens per second of the engine without eviction, which preempts"
    machine = results["frontier"].machine
    return [[what, machine, str(scene.get("naive", MISSING)), found, "`vtoken bench frontier`"]]
