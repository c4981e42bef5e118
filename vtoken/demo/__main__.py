"""`make demo`: compare naive and vtoken, serve chat traffic with two replicas, sum up."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from vtoken.core.errors import ConfigError, VTokenError
from vtoken.demo import summary, traffic
from vtoken.demo.children import run_json
from vtoken.environment import check_environment
from vtoken.models.hugging_face import validate_model_directory
from vtoken.processes import Mark
from vtoken.results import last_line
from vtoken.serving.local import LocalFleet
from vtoken.serving.settings import DeploymentSettings
from vtoken.serving.status import WIDE_AT
from vtoken.signals import stop_on_signals, stoppable

DEPLOYMENT = Path("deploy/serve/demo-cpu.yaml")
COMPARED = ("naive", "vtoken-strict", "vtoken")


def main() -> int:
    """Run the demo; 0 when its own bars hold, 1 when one does not, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the server up until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default=os.environ.get("VTOKEN_MODEL"), help="model directory")
    last_line.add_arguments(parser)
    arguments = parser.parse_args()
    return attended("demo", lambda console: run(arguments, console), interrupted=130)


def attended(name: str, work: Callable[[Console], int], interrupted: int) -> int:
    """The exit status of `work`, which somebody watches and may stop: 1 for a refusal, `interrupted` after Ctrl-C."""
    stop_on_signals()
    console = Console(width=None if sys.stdout.isatty() else WIDE_AT, log_path=False)
    try:
        check_environment()
        return work(console)
    except VTokenError as error:
        console.print(f"{name} failed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; no process is left behind")
        return interrupted


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Both parts and the summary."""
    started = time.monotonic()
    last_line.directory(arguments)  # a wrong one is refused now, not after minutes
    settings = load_settings(arguments.model)

    fleet = LocalFleet(settings, arguments.port, progress=stoppable(console.log))
    fleet.check_port()  # now, not after minutes
    measured = compare(settings.model, console)
    console.rule("2 of 2: two replicas serve chat requests, each with its own policy")
    with fleet:
        tally, state = traffic.serve(fleet.url, settings.served_model_name, console)
        result = summary.result(measured, tally, state, time.monotonic() - started)
        summary.show(console, measured, tally)
        missed = summary.missed_bars(result)
        last_line.keep(summary.outcome(result, measured, missed), arguments, "make demo")
        for bar in missed:
            console.print(f"missed: {bar}", style="red", markup=False)
        if arguments.keep:
            print(f"demo: {json.dumps(result)}", flush=True)
            keep(fleet.url, settings.served_model_name, console)
    if not arguments.keep:
        print(f"demo: {json.dumps(result)}", flush=True)  # behind everything that stopping says: the last line
    return 1 if missed else 0


def load_settings(model: str | None) -> DeploymentSettings:
    """The demo's deployment, with another model directory if one is named.

    Raises:
        ConfigError: the file is missing, is no YAML or has an impossible setting.
        ModelError: the model directory is incomplete.
    """
    try:
        args = yaml.safe_load(DEPLOYMENT.read_text())["applications"][0]["args"]
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(str(DEPLOYMENT), reason, "a Serve config file with applications[0].args") from None
    settings = DeploymentSettings.from_args({**args, **({"model": model} if model else {})})
    validate_model_directory(Path(settings.model))
    return settings


def compare(model: str, console: Console) -> dict[str, dict[str, Any]]:
    """Measure every variant, one after the other."""
    console.rule("1 of 2: the same 16 prompts, evictions and block budget; tokens hidden, or reclaimed")
    mark, measured = Mark(), {}
    threads = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1)
    for variant in COMPARED:
        with console.status(f"{variant}: starting the engine") as status:

            def progress(line: str, variant: str = variant) -> None:
                steps, waste, blocks = line.split()
                status.update(f"{variant}: step {steps}, F {waste}, {blocks} blocks in use")

            began = time.monotonic()
            measured[variant] = run_json(
                ["vtoken.demo.comparison", model, variant], mark, progress,
                OMP_NUM_THREADS=threads, VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="WARNING",
            )  # fmt: skip
        took = time.monotonic() - began
        console.log(f"{variant}: {measured[variant]['peak_blocks']} blocks at most, {took:.0f} s with start-up")
    return measured


def keep(url: str, model: str, console: Console) -> None:
    """Wait for Ctrl-C, with a command to try."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64})
    console.print("The server stays up until Ctrl-C. Try:")
    print(f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    print(f"  vtoken status --address {url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        stop_on_signals()
        while True:
            time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
