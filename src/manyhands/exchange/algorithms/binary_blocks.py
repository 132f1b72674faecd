"""Binary blocks: ranks in blocks of powers of two (13 = 8 + 4 + 1), each with halving-doubling.

    time    halving-doubling on the largest block
            + for each two neighbours b < b':  2 (b'/b alpha + N/b beta) + N/b' gamma

All blocks halve at once; sums flow from the smaller blocks to the largest, and back. A rank of the
smaller block owns a longer chunk; it splits it over the b'/b ranks of the larger block that own its
chunks. Where p is no power of two no rank is idle, as in a fold; but blocks of very different size
(33 = 32 + 1) load few ranks.

Paper: Rabenseifner 2004 (ICCS).
"""

from __future__ import annotations

from manyhands.exchange.algorithms.halving_doubling import double, halve
from manyhands.exchange.algorithms.vector import Vector


def binary_blocks(v: Vector) -> None:
    blocks = blocks_of(v.size)
    mine = next(i for i, block in enumerate(blocks) if v.rank in block)
    smallest = v.cut(len(blocks[0]))

    def chunks(block: range) -> list[slice]:
        """The chunks that the ranks of a block own, made of those of the largest block."""
        n = len(smallest) // len(block)
        return [
            slice(smallest[i].start, smallest[i + n - 1].stop) for i in range(0, len(smallest), n)
        ]

    def neighbours(other: range) -> list[tuple[int, slice]]:
        """The ranks of a neighbouring block whose chunks overlap ours, and the overlaps."""
        own, theirs = v.rank - blocks[mine].start, chunks(other)
        ours = chunks(blocks[mine])[own]
        n, m = len(blocks[mine]), len(other)
        overlapping = range(own * m // n, max(own * m // n + 1, (own + 1) * m // n))
        return [(other[i], ours if n > m else theirs[i]) for i in overlapping]

    inside = v.among(blocks[mine])
    halve(inside, chunks(blocks[mine]))
    smaller = neighbours(blocks[mine + 1]) if mine + 1 < len(blocks) else []
    larger = neighbours(blocks[mine - 1]) if mine else []
    for rank, part in smaller:
        v.reduce(rank, part)
    for rank, part in larger:
        v.send(rank, part)
    for rank, part in larger:
        v.receive(rank, part)
    for rank, part in smaller:
        v.send(rank, part)
    double(inside, chunks(blocks[mine]))


def blocks_of(size: int) -> list[range]:
    """Ranks in blocks of powers of two, the largest first."""
    blocks, start = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            blocks.append(range(start, start + (1 << bit)))
            start += 1 << bit
    return blocks
