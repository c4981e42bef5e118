"""The pure core: tables, occupancy, planners, policies, messages, telemetry, routing.

Standard library and numpy only; no I/O, clock or randomness of its own. Events in, commands out.
"""
