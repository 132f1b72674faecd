"""Binomial tree: sums go up a tree of depth L to rank 0, and the result comes down.

    time     2 L (alpha + N beta) + L N gamma,  L = ceil(log2 p)
    bytes    N for the sum, and N per child

In round i the ranks whose lowest set bit is bit i send their sum to the rank without that bit.

Paper: Thakur, Rabenseifner and Gropp 2005 (IJHPCA 19).
"""

from __future__ import annotations

from manyhands.exchange.algorithms.vector import Vector


def tree(v: Vector) -> None:
    lowest = v.rank & -v.rank if v.rank else 1 << v.size.bit_length()
    children = [
        v.rank + (1 << i)
        for i in range(v.size.bit_length())
        if (1 << i) < lowest and v.rank + (1 << i) < v.size
    ]
    for child in children:
        v.reduce(child, v.whole)
    if v.rank:
        v.send(v.rank - lowest, v.whole)
        v.receive(v.rank - lowest, v.whole)
    for child in reversed(children):  # the deepest subtree first: it takes longest
        v.send(child, v.whole)
