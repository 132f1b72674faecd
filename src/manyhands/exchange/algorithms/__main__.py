"""`python -m manyhands.exchange.algorithms [NAME]`: the worked example, step by step."""

from __future__ import annotations

import sys

from manyhands.exchange.algorithms import ALGORITHMS
from manyhands.exchange.algorithms.steps import EXAMPLE, steps

if __name__ == "__main__":
    for name in sys.argv[1:] or ALGORITHMS:
        print(steps(name, EXAMPLE), end="\n\n")
