"""What commands that measure or judge come to: their last line, and the result files that the documentation is made of.

outcome.py       what was found, and the last line
ratio.py         ratios of pairs, with their interval
machine.py       where it was found: machine, versions, the command without anybody's paths
files.py         result files: one JSON per id, raw samples as CSV beside it
last_line.py     the options and the end of `vtoken bench`, `vtoken drill` and `vtoken simulate`
"""
