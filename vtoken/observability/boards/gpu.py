"""GPU and engine: the machine under the replica, and what is installed."""

from __future__ import annotations

from vtoken.observability.boards.parts import GPU_VARIABLE, REPLICA_VARIABLES, by_replica, rate_by_replica
from vtoken.observability.metric import Unit
from vtoken.observability.panels import Board, Row, lines, number, table
from vtoken.observability.query import VARIABLES, rate, ratio, rise, series, total

REPLICA, GPU = "{{replica}}", "{{gpu}}"


def _by_gpu(name: str, *more: str, **own: str) -> str:
    """One value per GPU: several replicas on a GPU say the same."""
    return f"max by ({', '.join(('gpu', *more))}) ({series(name, within=VARIABLES, **own)})"


_GPUS = Row("GPUs", (
    number("GPUs up", "None on a machine without a driver.", Unit.COUNT,
           f'sum(max by (gpu) ({series("gpu_up")}))'),
    number("XID errors", "Critical events: look into the kernel log, drain the machine.", Unit.COUNT,
           f'sum(max by (gpu) ({rise("gpu_xid_errors_total")}))', (1, "red")),
    table("State", "Which GPU is down, and why?", ("gpu", "reason"), (_by_gpu("gpu_up", "reason"), "up"), width=16),
    lines("Memory", "Used memory includes the KV cache, which vLLM takes at start.", Unit.BYTES,
          (_by_gpu("gpu_memory_bytes", "kind"), f"{GPU} {{{{kind}}}}")),
    lines("Utilisation", "Low with many running requests: the engine waits for something else.", Unit.RATIO,
          (_by_gpu("gpu_utilization_ratio"), GPU)),
    lines("Power and its limit", "At the limit the clock falls.", Unit.WATTS,
          (_by_gpu("gpu_power_watts"), f"{GPU} drawn"), (_by_gpu("gpu_power_limit_watts"), f"{GPU} limit")),
    lines("Energy per token", "What a token costs.", Unit.JOULES,
          (ratio(total(rate("gpu_energy_joules_total")), total(rate("tokens_registered_total"))), "J / token")),
    lines("Temperature", "Heat holds the clock down.", Unit.CELSIUS, (_by_gpu("gpu_temperature_celsius"), GPU)),
    lines("Clocks", "Compare GPUs of one kind with each other.", Unit.HERTZ,
          (_by_gpu("gpu_clock_hertz", "clock"), f"{GPU} {{{{clock}}}}")),
    lines("Held down", "Why a clock is lower than it could be.", Unit.FLAG,
          (_by_gpu("gpu_throttled", "reason"), f"{GPU} {{{{reason}}}}")),
    lines("ECC errors", "Uncorrected errors end processes; many corrected ones announce them.", Unit.COUNT,
          (f'max by (gpu, kind) ({rate("gpu_ecc_errors_total")})', f"{GPU} {{{{kind}}}} / s")),
    lines("Remapped rows", "Pending: reset the GPU. Failure: replace it.", Unit.COUNT,
          (_by_gpu("gpu_remapped_rows", "kind"), f"{GPU} {{{{kind}}}}")),
    lines("MIG", "A split GPU offers fewer readings.", Unit.FLAG, (_by_gpu("gpu_mig_enabled"), GPU)),
    lines("NVML errors", "Readings that could not be made.", Unit.COUNT,
          (total(rate("nvml_errors_total"), "call", "error"), "{{call}} {{error}}")),
))  # fmt: skip

_ENGINE = Row("Engine", (
    lines("Steps", "Steps per second; zero with running requests is a stuck engine.", Unit.COUNT,
          (rate_by_replica("steps_total"), REPLICA)),
    lines("Running and waiting requests", "The batch, and what waits for it.", Unit.COUNT,
          (by_replica(series("running_requests")), f"{REPLICA} running"),
          (by_replica(series("waiting_requests")), f"{REPLICA} waiting")),
    lines("Tokens", "Prompt and generated tokens that entered token tables.", Unit.COUNT,
          (rate_by_replica("tokens_registered_total"), f"{REPLICA} / s")),
))  # fmt: skip

_BUILD = Row("Build and publisher", (
    table("What runs", "Replicas of one deployment should agree.",
          ("replica", "version", "vllm", "torch", "ray", "variant", "policy"),
          (total(series("build_info"), "replica", "version", "vllm", "torch", "ray", "variant", "policy"), "is")),
    table("Settings", "Numbers that the engines were started with.", ("key",),
          (f'min by (key) ({series("config")})', "lowest"), (f'max by (key) ({series("config")})', "highest"),
          width=12),
    lines("Publisher: CPU share", "What metrics cost, per process.", Unit.RATIO,
          (total(rate("publisher_cpu_seconds_total"), "process", "instance_id"), "{{process}} {{instance_id}}"),
          width=6),
    lines("Publisher: rounds and failures", "Rounds that stop: gauges of that process vanish.", Unit.COUNT,
          (total(rate("publishes_total"), "process"), "{{process}} rounds / s"),
          (total(rate("publish_errors_total"), "process"), "{{process}} with failures / s"), width=6),
))  # fmt: skip

BOARD = Board(
    "vtoken-gpu", "vToken / GPU and engine", "The machine under the replicas, and what is installed.",
    (_GPUS, _ENGINE, _BUILD), (*REPLICA_VARIABLES, GPU_VARIABLE),
)  # fmt: skip
