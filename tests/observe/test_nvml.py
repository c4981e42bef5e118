"""The real bindings on a built library: one process per case, because the bindings keep what they have loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from vtoken.observability.catalogue import BY_NAME
from vtoken.observability.nvml import GpuSampler

GPUS = ("GPU-00000000-stand-in", "GPU-00000001-stand-in")
SAMPLE = """
import json, os
from vtoken.observability.nvml import local_sampler
sampler = local_sampler()
rounds = []
for words in {rounds!r}:
    os.environ["VT_NVML"] = words
    rounds.append([[r.name, r.value, dict(r.labels)] for r in sampler.readings()])
sampler.close()
print(json.dumps(rounds))
"""


def sample(directory, *rounds, visible=None):
    """What the sampler reads in a process of its own, one mapping per round."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment["LD_LIBRARY_PATH"] = str(directory)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    command = [sys.executable, "-c", SAMPLE.format(rounds=rounds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    found = [
        {(name, *labels.values()): value for name, value, labels in readings} for readings in json.loads(done.stdout)
    ]
    assert all(key[0] in BY_NAME for readings in found for key in readings)
    return found


@pytest.fixture(scope="module")
def library(nvml_library):
    return nvml_library()


def test_a_healthy_gpu_says_everything_in_base_units(library):
    (seen,) = sample(library, "")
    for gpu in GPUS:
        assert seen["gpu_up", gpu, "up"] == 1
        assert seen["gpu_memory_bytes", gpu, "used"] == 49 << 30
        assert seen["gpu_memory_bytes", gpu, "reserved"] == 1 << 30
        assert seen["gpu_utilization_ratio", gpu] == 0.75
        assert seen["gpu_power_watts", gpu] == pytest.approx(412.345)
        assert seen["gpu_power_limit_watts", gpu] == 700
        assert seen["gpu_energy_joules_total", gpu] == 5000
        assert seen["gpu_temperature_celsius", gpu] == 61
        assert seen["gpu_clock_hertz", gpu, "sm"] == 1.98e9
        assert [seen["gpu_throttled", gpu, r] for r in ("power_cap", "thermal", "hw_slowdown")] == [1, 1, 0]
        assert seen["gpu_ecc_errors_total", gpu, "corrected"] == 3
        assert [seen["gpu_remapped_rows", gpu, k] for k in ("corrected", "uncorrected", "pending")] == [2, 1, 1]
        assert seen["gpu_xid_errors_total", gpu] == seen["gpu_mig_enabled", gpu] == 0
    gpu_metrics = {name for name, metric in BY_NAME.items() if name.startswith("gpu_")}
    assert {key[0] for key in seen} == gpu_metrics
    assert len(seen) <= 60 * len(GPUS)


def test_without_a_library_or_a_driver_a_reason_is_said_and_nothing_else(library, tmp_path):
    for directory, words in ((tmp_path, ""), (library, "no_driver")):
        assert sample(directory, words) == [{("gpu_up", "none", "no_driver"): 0}]


def test_a_lost_gpu_is_down_and_the_other_goes_on_and_it_may_return(library):
    before, lost, after = sample(library, "", "lost1", "")
    assert lost["gpu_up", GPUS[1], "lost"] == 0
    assert ("gpu_memory_bytes", GPUS[1], "used") not in lost
    assert lost["nvml_errors_total", "DeviceGetPowerUsage", "gpu_is_lost"] == 1
    assert {k: v for k, v in lost.items() if k[1] == GPUS[0]} == {k: v for k, v in before.items() if k[1] == GPUS[0]}
    assert after["gpu_up", GPUS[1], "up"] == 1


def test_what_a_split_gpu_does_not_offer_is_left_out_and_is_no_failure(library):
    (seen,) = sample(library, "mig")
    assert (seen["gpu_mig_enabled", GPUS[0]], seen["gpu_mig_enabled", GPUS[1]]) == (1, 0)
    assert ("gpu_utilization_ratio", GPUS[0]) not in seen
    assert seen["gpu_up", GPUS[0], "up"] == 1
    assert not any(name == "nvml_errors_total" for name, *_ in seen)


def test_a_gpu_that_offers_nothing_but_memory_is_up(library):
    (seen,) = sample(library, "unsupported")
    assert {key[0] for key in seen} == {"gpu_up", "gpu_memory_bytes", "gpu_xid_errors_total"}
    assert seen["gpu_up", GPUS[0], "up"] == 1


def test_an_old_driver_without_some_symbols_says_the_rest(nvml_library):
    (seen,) = sample(nvml_library("-DOLD_DRIVER"), "")
    assert seen["gpu_memory_bytes", GPUS[0], "used"] == 50 << 30
    assert ("gpu_memory_bytes", GPUS[0], "reserved") not in seen
    assert not any(name in {"gpu_remapped_rows", "gpu_throttled", "nvml_errors_total"} for name, *_ in seen)


def test_a_critical_event_counts_once(library):
    assert [seen["gpu_xid_errors_total", GPUS[0]] for seen in sample(library, "xid", "xid")] == [1, 1]


@pytest.mark.parametrize(
    ("visible", "seen"), [("1", GPUS[1:]), (GPUS[0], GPUS[:1]), ("0,1", GPUS), ("", ()), ("GPU-9", ())]
)
def test_only_gpus_that_the_process_may_use_are_read(library, visible, seen):
    (found,) = sample(library, "", visible=visible)
    assert {key[1] for key in found if key[0] == "gpu_up"} == (set(seen) or {"none"})


def test_bindings_that_break_in_any_way_do_not_reach_the_caller():
    class Broken:
        def __getattr__(self, name):
            raise OSError(name)

    (reading,) = GpuSampler(Broken()).readings()
    assert (reading.value, reading.labels["reason"]) == (0, "error")
    assert next(iter(GpuSampler(None).readings())).labels["reason"] == "no_driver"
