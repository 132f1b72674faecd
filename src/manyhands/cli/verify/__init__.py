"""`manyhands verify script.py data=3`: compare a few steps under the plan with one process.

    command.py          prints the comparison and gives a verdict
    comparison.py       runs the task under the plan and on one process, and records both
    deviation.py        how far the two are apart, and how far they may be
    random_rounding.py  how far rounding alone moves the task on one process

Both start from the same seed and use the same samples; the global batch of the plan is the batch of
the one process. In float64 another summation order changes results by about 1e-15, an error in the
method by about 1e-3, so the two are rarely confused. Where they could be, because a model computes
in float32 inside or amplifies rounding, the bound is measured.
"""

from manyhands.cli.verify.command import verify as verify
from manyhands.cli.verify.comparison import compare as compare
