"""Butterfly (recursive doubling): in round i each rank exchanges all with the rank of other bit i.

    time     log2 p (alpha + N beta + N gamma), folded where p is no power of two
    bytes    N log2 p

The fewest rounds possible: for short messages. All ranks build the same tree of sums, so all get
the same bits.

Paper: Thakur, Rabenseifner and Gropp 2005 (IJHPCA 19).
"""

from __future__ import annotations

from manyhands.exchange.algorithms.vector import Vector, fold


def butterfly(v: Vector) -> None:
    fold(v, _double)


def _double(v: Vector) -> None:
    distance = 1
    while distance < v.size:
        peer = v.rank ^ distance
        v.exchange(to=peer, give=v.whole, source=peer, take=v.whole, reduce=True)
        distance *= 2
