"""What operators see: the metrics, who publishes them, boards, alerts. Imports neither Ray nor vLLM.

`catalogue` names every metric once. `readings` turns snapshots and fleet views into values, `publisher` turns values
into updates of a metric library, `nvml` reads the GPUs. Boards, alerts and docs/metrics.md are generated from here.
"""
