"""The evaluation harness: `vtoken bench NAME` answers one question on the real engine.

Every benchmark ends with one line of JSON (`vtoken.results.outcome`); the exit status is 0 only if its bar holds. With
`--record` it also writes the result file that `vtoken bench tables` and `vtoken bench report` read.
"""
