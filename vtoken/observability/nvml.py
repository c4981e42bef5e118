"""GPU readings through NVML (nvidia-ml-py). Every call is guarded by itself; no driver is a normal state.

    no library or driver ──► gpu_up{gpu="none", reason="no_driver"} 0, asked again every RETRY_ROUNDS
    a GPU that is lost ────► gpu_up{gpu=UUID, reason="lost"} 0; the others go on
    a call that fails ─────► its value is left out, and nvml_errors_total counts it
    not offered here ──────► its value is left out (MIG, small boards, an old driver without the symbol)

NVML must be initialised after a fork, in the process that asks: the first `readings` does it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vtoken.observability.catalogue import THROTTLES
from vtoken.observability.publisher import Reading

RETRY_ROUNDS = 30
MAX_EVENTS = 64
"""Most events taken out of NVML's queue in one round."""


@dataclass(frozen=True, slots=True)
class _Gpu:
    uuid: str
    handle: Any


class GpuSampler:
    """Owner of this process's NVML session.

    Args:
        nvml: the module `pynvml`, or None where it is not installed.
        visible: as CUDA_VISIBLE_DEVICES: indices or UUIDs, "" for none, None for all.
    """

    def __init__(self, nvml: Any, visible: str | None = None) -> None:
        self._nvml, self._visible = nvml, visible
        self._gpus: list[_Gpu] = []
        self._events: Any = None
        self._xids: Counter[str] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()
        self._wait = 0
        self._why = "no_driver"

    def readings(self) -> Iterator[Reading]:
        """One look at every GPU; never raises."""
        if not self._gpus and self._wait <= 0:
            self._open()
            self._wait = RETRY_ROUNDS
        self._wait -= 1
        if not self._gpus:
            yield Reading("gpu_up", 0, {"gpu": "none", "reason": self._why})
        self._take_events()
        for gpu in self._gpus:
            yield from self._look_at(gpu)
        for (call, error), count in sorted(self._errors.items()):
            yield Reading("nvml_errors_total", count, {"call": call, "error": error})

    def close(self) -> None:
        """End the session; may be called at any time."""
        if self._gpus:
            self._gpus = []
            self._ask("Shutdown")

    # ---- the session ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._nvml is None:
            return
        try:
            self._nvml.nvmlInit()
        except Exception as error:  # noqa: BLE001  # whatever a broken installation does
            absent = {"NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"}
            self._why = "no_driver" if type(error).__name__ in absent else "error"
            return
        indices = range(self._ask("DeviceGetCount") or 0)
        found = [gpu for gpu in map(self._find, indices) if gpu is not None]
        self._gpus = [gpu for index, gpu in enumerate(found) if self._is_visible(index, gpu.uuid)]
        if not self._gpus:
            self._why = "no_gpu"
            self._ask("Shutdown")
        self._watch_events()

    def _find(self, index: int) -> _Gpu | None:
        handle = self._ask("DeviceGetHandleByIndex", index)
        uuid = None if handle is None else self._ask("DeviceGetUUID", handle)
        return None if uuid is None else _Gpu(uuid, handle)

    def _is_visible(self, index: int, uuid: str) -> bool:
        if self._visible is None:
            return True
        wanted = [item.strip() for item in self._visible.split(",") if item.strip()]
        return str(index) in wanted or any(item.startswith("GPU-") and uuid.startswith(item) for item in wanted)

    def _watch_events(self) -> None:
        self._events = self._ask("EventSetCreate") if self._gpus else None
        for gpu in self._gpus if self._events is not None else []:
            self._ask("DeviceRegisterEvents", gpu.handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)

    def _take_events(self) -> None:
        for _ in range(MAX_EVENTS if self._events is not None and self._gpus else 0):
            event = self._ask("EventSetWait_v2", self._events, 0)
            if event is None:
                return
            uuid = self._ask("DeviceGetUUID", event.device)
            self._xids[uuid or self._gpus[0].uuid] += 1

    # ---- one GPU -------------------------------------------------------------------------------------------------

    def _look_at(self, gpu: _Gpu) -> Iterator[Reading]:
        lost_before = self._lost()
        found = [
            Reading(name, value, {"gpu": gpu.uuid, **labels})
            for look in (self._memory, self._load, self._power, self._clocks, self._faults)
            for name, value, labels in look(gpu.handle)
            if value is not None
        ]
        lost = self._lost() > lost_before
        yield Reading("gpu_up", int(not lost), {"gpu": gpu.uuid, "reason": "lost" if lost else "up"})
        yield Reading("gpu_xid_errors_total", self._xids[gpu.uuid], {"gpu": gpu.uuid})
        yield from found

    def _lost(self) -> int:
        return sum(count for (_, error), count in self._errors.items() if error == "gpu_is_lost")

    def _memory(self, handle: Any) -> Iterator[tuple[str, Any, dict[str, str]]]:
        # Version 2 counts what the driver keeps for itself apart from what is in use.
        memory = self._ask("DeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2) or self._ask(
            "DeviceGetMemoryInfo", handle
        )
        for kind in ("used", "free", "reserved"):
            yield "gpu_memory_bytes", getattr(memory, kind, None), {"kind": kind}

    def _load(self, handle: Any) -> Iterator[tuple[str, Any, dict[str, str]]]:
        rates = self._ask("DeviceGetUtilizationRates", handle)
        yield "gpu_utilization_ratio", None if rates is None else rates.gpu / 100, {}
        celsius = self._ask("DeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU)
        yield "gpu_temperature_celsius", celsius, {}
        mig = self._ask("DeviceGetMigMode", handle)
        yield "gpu_mig_enabled", None if mig is None else int(mig[0]), {}

    def _power(self, handle: Any) -> Iterator[tuple[str, Any, dict[str, str]]]:
        for name, call in (
            ("gpu_power_watts", "DeviceGetPowerUsage"),
            ("gpu_power_limit_watts", "DeviceGetEnforcedPowerLimit"),
            ("gpu_energy_joules_total", "DeviceGetTotalEnergyConsumption"),
        ):
            yield name, _scaled(self._ask(call, handle), 1e-3), {}

    def _clocks(self, handle: Any) -> Iterator[tuple[str, Any, dict[str, str]]]:
        for clock, number in (("sm", self._nvml.NVML_CLOCK_SM), ("memory", self._nvml.NVML_CLOCK_MEM)):
            yield "gpu_clock_hertz", _scaled(self._ask("DeviceGetClockInfo", handle, number), 1e6), {"clock": clock}
        held = self._ask("DeviceGetCurrentClocksThrottleReasons", handle)
        nvml = self._nvml
        bits = (
            nvml.nvmlClocksThrottleReasonSwPowerCap,
            nvml.nvmlClocksThrottleReasonSwThermalSlowdown,
            nvml.nvmlClocksThrottleReasonHwSlowdown,
            nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
            nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        )
        for reason, bit in zip(THROTTLES, bits, strict=True):
            yield "gpu_throttled", None if held is None else int(bool(held & bit)), {"reason": reason}

    def _faults(self, handle: Any) -> Iterator[tuple[str, Any, dict[str, str]]]:
        nvml = self._nvml
        for kind, number in (
            ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        ):
            count = self._ask("DeviceGetTotalEccErrors", handle, number, nvml.NVML_VOLATILE_ECC)
            yield "gpu_ecc_errors_total", count, {"kind": kind}
        rows = self._ask("DeviceGetRemappedRows", handle)
        for kind, count in zip(("corrected", "uncorrected", "pending", "failure"), rows or (), strict=False):
            yield "gpu_remapped_rows", int(count), {"kind": kind}

    def _ask(self, call: str, *arguments: Any) -> Any:
        """The answer of one NVML call, or None; what is a failure is counted."""
        try:
            return getattr(self._nvml, f"nvml{call}")(*arguments)
        except Exception as error:  # noqa: BLE001  # one reading is never worth an engine
            word = _error_word(error)
            if word not in {"not_supported", "function_not_found", "timeout"}:
                self._errors[call, word] += 1
            return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _error_word(error: Exception) -> str:
    """`NVMLError_GpuIsLost` -> `gpu_is_lost`; bounded, because NVML's errors are."""
    name = type(error).__name__.removeprefix("NVMLError_")
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def local_sampler() -> GpuSampler:
    """A sampler of the GPUs that this process may use."""
    try:
        import pynvml
    except ImportError:
        pynvml = None
    return GpuSampler(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
