"""Star: every rank sends everything to rank 0, which sums and sends the result to all.

    time     2 (p-1) (alpha + N beta) + (p-1) N gamma
    bytes    leaf N, root (p-1) N

The simplest, and the fastest for two ranks or where only one rank can be reached by all others.
"""

from __future__ import annotations

from manyhands.exchange.algorithms.vector import Vector


def star(v: Vector) -> None:
    if v.rank != 0:
        v.send(0, v.whole)
        v.receive(0, v.whole)
        return
    for leaf in range(1, v.size):
        v.reduce(leaf, v.whole)
    for leaf in range(1, v.size):
        v.send(leaf, v.whole)
