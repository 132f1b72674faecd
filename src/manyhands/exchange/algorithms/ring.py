"""Ring: each chunk is summed on its first round through the ranks and copied on its second.

    time     2 (p-1) alpha + 2 (p-1)/p N beta + (p-1)/p N gamma
    bytes    2 (p-1)/p N

Reduce-scatter, then all-gather. No algorithm sends fewer bytes, and every rank exchanges only with
its neighbours: for long messages.

Patarasuk, Yuan 2009.
"""

from __future__ import annotations

from manyhands.exchange.algorithms.vector import Vector


def ring(v: Vector) -> None:
    reduce_scatter(v)
    all_gather(v)


def reduce_scatter(v: Vector) -> slice:
    """Rank r ends with the sum of chunk r + 1, which is returned."""
    p, chunks = v.size, v.cut(v.size)
    for s in range(p - 1):
        give, take = chunks[(v.rank - s) % p], chunks[(v.rank - s - 1) % p]
        v.exchange(to=(v.rank + 1) % p, give=give, source=(v.rank - 1) % p, take=take, reduce=True)
    return chunks[(v.rank + 1) % p]


def all_gather(v: Vector) -> None:
    p, chunks = v.size, v.cut(v.size)
    for s in range(p - 1):
        give, take = chunks[(v.rank + 1 - s) % p], chunks[(v.rank - s) % p]
        v.exchange(to=(v.rank + 1) % p, give=give, source=(v.rank - 1) % p, take=take)
