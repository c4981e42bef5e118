"""The measured run: Llama-3.1-8B on an RTX 4090 under vLLM 0.19, 300 ShareGPT requests, memory short throughout.

Nothing is fitted to it. Step times come from the latency grid (vtoken.simulate.steptime), which was measured without
a running server; the scheduler's rules from vLLM; pool, batch and arrivals from the run's own description.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.core.errors import ConfigError
from vtoken.simulate import traces
from vtoken.simulate.replicas import Replicas
from vtoken.simulate.state import EngineShape
from vtoken.simulate.steptime import Fit, fit
from vtoken.simulate.workload import Workload

GRID, RUN = "perf_RTX4090_llama31_8b", "bench_RTX4090_llama31_8b"
TOLERANCE = 0.10
LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Observed:
    """What is compared.

    Attributes:
        makespan_s: from the first arrival to the last token.
        kv_use: mean share of the pool in use, once per second. peak_running: most requests that ran.
        output_tokens_per_s: over the makespan.
        first_token_s, token_s, latency_s: means; not part of the bar.
    """

    makespan_s: float
    kv_use: float
    peak_running: float
    output_tokens_per_s: float
    first_token_s: float
    token_s: float
    latency_s: float


BAR = ("makespan_s", "kv_use", "peak_running", "output_tokens_per_s")


def folder(data: Path, name: str) -> Path:
    """A folder of the data directory.

    Raises:
        ConfigError: it is not there.
    """
    found = sorted(path for path in data.rglob(name) if path.is_dir())
    if not found:
        raise ConfigError("data", str(data), f"a directory with the folder {name} in it or below it")
    return found[0]


def grid(data: Path) -> Fit:
    """The step-time model of the RTX 4090."""
    return fit(folder(data, GRID))


def measured(data: Path) -> Observed:
    """What the run itself says."""
    path = folder(data, RUN)
    requests = [json.loads(line) for line in (path / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
    with (path / "timeseries.csv").open(encoding="utf-8", newline="") as file:
        series = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    queued, first, last, output = (
        np.array([request[key] for request in requests], float)
        for key in ("queued_ts", "first_token_ts", "last_token_ts", "output_toks")
    )
    return _observed(
        queued,
        first,
        last,
        output,
        [row["kv_cache_pct"] / 100 for row in series],
        max(row["running"] for row in series),
    )


def simulated(data: Path, step_time: Fit) -> Observed:
    """The same requests on a simulated engine of the same settings."""
    meta: dict[str, Any] = json.loads((folder(data, RUN) / "meta.json").read_text(encoding="utf-8"))
    cache, engine = meta["kv_cache"], meta["engine_kwargs"]
    shape = EngineShape(
        cache["num_gpu_blocks"] - 1, step_time.model, cache["block_size"], engine["max_num_batched_tokens"],
        engine["max_num_seqs"], cache["enable_prefix_caching"],
    )  # fmt: skip
    return run_alone(traces.sharegpt(data), shape)


def run_alone(work: Workload, shape: EngineShape) -> Observed:
    """One engine serves a whole trace.

    Raises:
        ConfigError: it has not ended after an hour of simulated time.
    """
    engine, kv_use = Replicas(work, shape), []
    for request in range(len(work)):
        engine.send(request, 0, float(work.arrival_s[request]))
    while engine.busy():
        if engine.now_s > LONGEST_S + work.seconds:
            raise ConfigError("trace", work.name, f"requests that one engine serves within {LONGEST_S:g} s")
        engine.advance(engine.now_s + 1.0)
        kv_use.append(1.0 - engine.state.lines["free"][0] / shape.blocks)
    requests = engine.state.requests
    return _observed(
        work.arrival_s, requests["first_s"], requests["end_s"], work.output_tokens, kv_use,
        float(engine.state.lines["peak_running"][0]),
    )  # fmt: skip


def _observed(queued: Any, first: Any, last: Any, output: Any, kv_use: list[float], peak: float) -> Observed:
    makespan = float(last.max() - queued.min())
    per_token = (last - first) / np.maximum(output - 1, 1)
    return Observed(
        makespan, float(np.mean(kv_use)), float(peak), float(output.sum() / makespan), float((first - queued).mean()),
        float(per_token.mean()), float((last - queued).mean()),
    )  # fmt: skip
