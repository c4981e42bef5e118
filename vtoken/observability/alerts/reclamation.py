"""Is what comes back correct, does enough come back, and what does it cost?"""

from __future__ import annotations

from vtoken.observability.rules import REPLICA, Alert, Recording, added, all_of, more, over, per_second, top

RECORDINGS = (
    Recording("vtoken:waste_above_theta:avg10m",
              f'{top(over("avg", "waste_ratio", "10m"), REPLICA)} - '
              f'{top(all_of("config", key="theta_f"), REPLICA)}'),
    Recording("vtoken:copy_seconds:mean10m",
              f'{per_second("copy_seconds_total", "10m")} / ({per_second("copies_total", "10m")} > 0)'),
    Recording("vtoken:copy_bytes_per_second:mean10m",
              f'{per_second("moved_bytes_total", "10m")} / ({per_second("copy_seconds_total", "10m")} > 0)'),
    Recording("vtoken:substrate_share:rate10m", per_second("substrate_seconds_total", "10m")),
    Recording("vtoken:blocks_net:rate10m",
              f'{per_second("blocks_released_total", "10m")} - {per_second("blocks_consumed_total", "10m")}'),
)  # fmt: skip

_INTEGRITY = (
    Alert("MoveCheckFailed", top(all_of("move_check_failures_total"), REPLICA), "> 0", "0s", "critical",
          "Moved bytes differed on replica {{ $labels.replica }}; relocation is off there"),
    Alert("Degraded", top(all_of("degraded"), REPLICA), "> 0", "0s", "critical",
          "Replica {{ $labels.replica }} serves without relocation since a check failed"),
    Alert("MoveChecksStopped",
          f'{more("moves_total", "30m")} * ({more("move_checks_total", "30m")} == bool 0) * '
          f'({top(all_of("config", key="check_moves"), REPLICA)} > bool 0)', "> 5000", "10m", "warning",
          "Replica {{ $labels.replica }} moves tokens, and none of its moves is checked"),
    Alert("PolicyFailing", more("policy_failures_total", "10m"), "> 0", "0s", "warning",
          "A policy failed on replica {{ $labels.replica }}; its requests keep all their tokens"),
)  # fmt: skip

_YIELD = (
    Alert("WasteNotReclaimed", "vtoken:waste_above_theta:avg10m", "> 0.15", "10m", "warning",
          "F on replica {{ $labels.replica }} has been above theta_F by {{ $value }} for long"),
    Alert("NoYield", f'{per_second("tokens_evicted_total", "15m")} * ({per_second("blocks_released_total", "15m")} '
          "== bool 0)", "> 1", "10m", "warning",
          "Replica {{ $labels.replica }} evicts tokens, and no block comes back"),
    Alert("ConsumesMoreThanItReleases", "vtoken:blocks_net:rate10m", "< -0.1", "15m", "warning",
          "Evacuation on replica {{ $labels.replica }} costs more blocks than it releases"),
    Alert("HeadroomExhausted",
          f'1 - {added(all_of("kv_blocks", state="reserved"), REPLICA)} / '
          f'({added(all_of("headroom_target_blocks"), REPLICA)} > 0)', "> 0.75", "5m", "warning",
          "The reserve of replica {{ $labels.replica }} is short of its target by {{ $value }}"),
    Alert("PlansDeferred", per_second("plans_deferred_total", "10m"), "> 1", "10m", "warning",
          "Replica {{ $labels.replica }} defers {{ $value }} plans a second for want of reserve"),
    Alert("HoldsExpired", per_second("holds_expired_total", "10m"), "> 0.05", "5m", "warning",
          "Requests on replica {{ $labels.replica }} wait for a reserve that is not refilled"),
    Alert("Preemptions", per_second("preemptions_total", "10m"), "> 0.1", "10m", "warning",
          "Replica {{ $labels.replica }} preempts {{ $value }} requests a second"),
)  # fmt: skip

_COST = (
    Alert("CopyStuck",
          f'{added(over("min", "inflight_plans", "5m"), REPLICA)} * '
          f'({more("copies_total", "5m")} == bool 0)', "> 0", "2m", "critical",
          "Copies are under way on replica {{ $labels.replica }}, and none ends"),
    Alert("CopySlow", "vtoken:copy_seconds:mean10m", "> 0.05", "10m", "warning",
          "A copy on replica {{ $labels.replica }} takes {{ $value }} s on average"),
    Alert("StallsHigh", f'{per_second("copy_waits_total", "10m")} / ({per_second("copies_total", "10m")} > 0)',
          "> 0.5", "10m", "warning",
          "The engine of replica {{ $labels.replica }} waits for a share of {{ $value }} of its copies"),
    Alert("HostSync", more("host_syncs_total", "10m"), "> 0", "0s", "warning",
          "The host of replica {{ $labels.replica }} has stood still for its GPU {{ $value }} times in 10 minutes"),
    Alert("OverheadHigh", "vtoken:substrate_share:rate10m", "> 0.1", "10m", "warning",
          "The substrate of replica {{ $labels.replica }} takes a share of {{ $value }} of its time"),
)  # fmt: skip

ALERTS = (*_INTEGRITY, *_YIELD, *_COST)
