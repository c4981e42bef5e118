"""`vtoken simulate`: one fleet on one trace; or `--check`: is the simulator right? `--study`: the routers compared;
`--sensitivity`: what every setting of reclamation does to memory.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from rich.console import Console

from vtoken.core.errors import ConfigError
from vtoken.results import last_line
from vtoken.results.outcome import Outcome
from vtoken.simulate.frontier import VARIANTS
from vtoken.simulate.routers import ROUTERS
from vtoken.simulate.traces import TRACES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--data", default=os.environ.get("VTOKEN_DATA"), help="directory with traces and latency grids")
    parser.add_argument("--check", action="store_true", help="compare with a measured run and with measured capacities")
    parser.add_argument("--sensitivity", action="store_true", help="Q6: waste and moves by setting; needs no data")
    parser.add_argument("--study", action="store_true", help="compare all routers on all cases")
    parser.add_argument(
        "--case", default="", metavar="TEXT", help="of the study, the case of that name, or those with it in theirs"
    )
    parser.add_argument("--trace", choices=sorted(TRACES), default="azure", help="(default: %(default)s)")
    parser.add_argument("--router", choices=ROUTERS, default="ours", help="(default: %(default)s)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4], help="one or, in a study, more (default: 4)")
    parser.add_argument("--requests", type=int, default=1000, help="of the trace (default: %(default)s)")
    parser.add_argument("--rate", type=float, help="requests per second and replica (default: as in the trace)")
    parser.add_argument("--ingresses", type=int, default=1, help="routers side by side (default: %(default)s)")
    parser.add_argument("--heartbeat-s", type=float, default=0.1, help="of replicas (default: %(default)s)")
    parser.add_argument(
        "--keep-ratio", type=float, help="share of its tokens that every request keeps, by random choice"
    )
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="eager", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    last_line.add_arguments(parser, "; of one fleet also its time series, as CSV and, with matplotlib, as a picture")


def run(arguments: argparse.Namespace) -> int:
    """Run what was asked for; 0, or 1 when a bar is missed.

    Raises:
        ConfigError: no data directory, or a file is missing in it.
    """
    last_line.directory(arguments)  # a wrong one is refused now, not after the run
    if arguments.sensitivity:
        return last_line.finish(_sensitivity(), arguments)
    if not arguments.data:
        raise ConfigError("data", arguments.data, "a directory with traces (--data DIR or VTOKEN_DATA)")
    if arguments.check:
        from vtoken.simulate.check import check

        values, holds = check(Path(arguments.data))
        return last_line.finish(Outcome("simulate-check", holds, values), arguments)
    return last_line.finish(_study(arguments) if arguments.study else _one(arguments), arguments)


def _sensitivity() -> Outcome:
    from vtoken.device.table_kernels import CompiledKernels
    from vtoken.simulate.sensitivity import judge, sensitivity

    points = list(sensitivity(CompiledKernels()))
    values, holds = judge(points)
    return Outcome("simulate-sensitivity", holds, {**values, "points": points})


def _one(arguments: argparse.Namespace) -> Outcome:
    from vtoken.simulate.calibration import grid
    from vtoken.simulate.fleet import Fleet, FleetShape
    from vtoken.simulate.outcome import ServiceLevel, plot_series, summary, write_series
    from vtoken.simulate.study import engine_of, slowness_of

    if len(arguments.replicas) > 1:
        raise ConfigError("replicas", arguments.replicas, "one number", "Several are for --study.")
    data, count = Path(arguments.data), arguments.replicas[0]
    work = TRACES[arguments.trace](data).repeated(arguments.requests)
    if arguments.rate:
        work = work.at_rate(arguments.rate * count)
    engine = engine_of(arguments.trace, grid(data).model, arguments.variant, arguments.keep_ratio)
    slowness = [slowness_of(arguments.trace)] * count
    shape = FleetShape(engine, [engine.blocks] * count, slowness, arguments.ingresses, arguments.heartbeat_s)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    outcome = Fleet(work, shape, arguments.router, seed=arguments.seed).run()
    values = {key: round(value, 4) for key, value in summary(outcome, ServiceLevel()).items()}
    values |= {"wall_s": round(time.perf_counter() - began_s, 1), "cpu_s": round(time.process_time() - began_cpu_s, 1)}
    if arguments.out:
        out = Path(arguments.out)
        write_series(out / "series.csv", outcome)
        plot_series(out / "series.png", outcome)
    return Outcome("simulate", values["done"] + values["failed"] == len(work), values)


def _study(arguments: argparse.Namespace) -> Outcome:
    from vtoken.simulate.study import holds, study, verdicts

    log = Console(stderr=True).log
    rows = study(Path(arguments.data), arguments.replicas, arguments.case, arguments.seed, log)
    found = verdicts(rows)
    words = {word: sum(one["verdict"] == word for one in found) for word in ("wins", "ties", "loses")}
    worst = min((one["over_best"] for one in found), default=0.0)
    values = {**words, "worst_over_best": round(worst, 3), "verdicts": found}
    return Outcome("simulate-study", holds(found), values, samples=rows)
