"""The simulator: engines, replicas and routers without a GPU; only time is modelled.

What decides is the pure core itself, or a model of it that a check compares with it. See docs/simulator.md.
"""
