"""The evaluation harness: `vtoken bench NAME` answers one question on the real engine.

Every benchmark ends with one line of JSON: {"id", "pass", "values", "command"}; the exit status is 0
only if its bar holds.
"""
