"""Is the hardware well? A machine without a GPU or driver has none of these series."""

from __future__ import annotations

from vtoken.observability.rules import GPU, Alert, all_of, lowest, over, top

_PRESENT = all_of("gpu_up").removesuffix("}") + '{gpu!="none"}'

ALERTS = (
    Alert("GpuDown", lowest(_PRESENT, GPU), "< 1", "15s", "critical",
          "GPU {{ $labels.gpu }} of replica {{ $labels.replica }} does not answer"),
    Alert("GpuXid", top(f"increase({all_of('gpu_xid_errors_total')}[10m])", GPU), "> 0", "0s", "critical",
          "Critical event (XID) on GPU {{ $labels.gpu }}"),
    Alert("GpuEcc", top(f"increase({all_of('gpu_ecc_errors_total', kind='uncorrected')}[1h])", GPU), "> 0", "0s",
          "critical", "Uncorrected memory errors on GPU {{ $labels.gpu }}"),
    Alert("GpuRemapPending", top(all_of("gpu_remapped_rows", kind="pending"), GPU), "> 0", "5m", "warning",
          "GPU {{ $labels.gpu }} wants a reset to take bad memory rows out of use"),
    Alert("GpuThrottled", top(over("avg", "gpu_throttled", "10m", reason="thermal"), GPU), "> 0.5", "5m",
          "warning", "Heat holds down the clock of GPU {{ $labels.gpu }}"),
)  # fmt: skip
