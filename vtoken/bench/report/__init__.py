"""`vtoken bench report`: one HTML page with the paper's figures, re-drawn from the result files.

figure.py        what a figure is: rows of numbers, and how they are drawn
capacity.py      figures 1, 7, 8, 9, 10; prefix caching, sensitivity
cost.py          figure 11; bookkeeping, speed, quality
fleet.py         the simulator and the routers
quick.py         measure again, in minutes, on this machine
page.py          the page
report_command.py
"""
