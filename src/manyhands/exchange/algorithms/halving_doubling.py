"""Recursive halving and doubling: half to a distant rank, a quarter to a nearer one, and so on.

    time     2 log2 p alpha + 2 (p-1)/p N beta + (p-1)/p N gamma, folded where p is no power of two
    bytes    2 (p-1)/p N

After the halving rank i owns the sum of chunk i; the doubling collects chunks.

Thakur, Rabenseifner, Gropp 2005.
"""

from __future__ import annotations

from manyhands.exchange.algorithms.vector import Vector, fold


def halving_doubling(v: Vector) -> None:
    fold(v, _halve_and_double)


def _halve_and_double(v: Vector) -> None:
    chunks = v.cut(v.size)
    halve(v, chunks)
    double(v, chunks)


def halve(v: Vector, chunks: list[slice]) -> None:
    """Reduce-scatter: each rank ends with the sum of its own chunk; their number is a power of
    two."""
    distance = v.size // 2
    while distance:
        peer = v.rank ^ distance
        v.exchange(
            to=peer,
            give=_block(chunks, peer, distance),
            source=peer,
            take=_block(chunks, v.rank, distance),
            reduce=True,
        )
        distance //= 2


def double(v: Vector, chunks: list[slice]) -> None:
    """All-gather: each rank begins with its own chunk and ends with all."""
    distance = 1
    while distance < v.size:
        peer = v.rank ^ distance
        v.exchange(
            to=peer,
            give=_block(chunks, v.rank, distance),
            source=peer,
            take=_block(chunks, peer, distance),
        )
        distance *= 2


def _block(chunks: list[slice], rank: int, length: int) -> slice:
    """The aligned block of `length` chunks that holds the chunk of `rank`."""
    first = rank // length * length
    return slice(chunks[first].start, chunks[first + length - 1].stop)
