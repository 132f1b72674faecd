"""Double binary tree, pipelined: two trees, each for half of the vector.

    time     ~ (sqrt(2 L alpha) + sqrt(2 N beta))^2 + N gamma,  L = ceil(log2 p)
    bytes    <= 2N

In one tree the leaves, half of all ranks, send little. A rank that has children in one of the two
trees is a leaf in the other, so every rank sends as much as its port can. Each half goes up and
comes down in k segments, so that all levels of the trees work at once:
(L + k) (alpha + N/2 beta / k) is least at k = sqrt(L N/2 beta / alpha).

Sanders, Speck, Traeff 2009.
"""

from __future__ import annotations

import math

from manyhands.core import Finished, Work
from manyhands.exchange.algorithms.vector import Vector

# alpha / beta: about what sockets between processes send in the time of one latency
LATENCY_BYTES = 256 << 10


def double_tree(v: Vector, latency_bytes: float = LATENCY_BYTES) -> None:
    halves = v.cut(2)
    nbytes = (halves[0].stop - halves[0].start) * v.values.element_size()
    segments = max(1, round(math.sqrt(math.log2(v.size) * nbytes / latency_bytes)))
    trees = [
        (*_family((v.rank + shift) % v.size, v.size, shift), v.cut(segments, halves[shift]))
        for shift in range(2)
    ]
    # A leaf waits for no child. If its segments took turns with those that wait for children,
    # each tree would wait for the other.
    trees.sort(key=lambda tree: len(tree[1]))
    sent: list[Work] = []
    for parent, children, parts in trees:  # up
        for part in parts:
            for child in children:
                v.reduce(child, part)
            sent += [v.post(parent, part)] if parent is not None else []
    for work in sent:
        work.wait()  # what was sent up is about to be replaced
    under_way: list[Work] = []
    for parent, children, parts in trees:  # down
        for part in parts:
            coming = v.expect(parent, part) if parent is not None else Finished()
            if children:
                coming.wait()
            under_way += [coming, *(v.post(child, part) for child in children)]
    for work in under_way:
        work.wait()


def _family(position: int, size: int, shift: int) -> tuple[int | None, list[int]]:
    """Parent and children, as ranks, of the rank at `position`.

    The root of positions first..last is the number that divides by the highest power of two. So
    all odd positions are leaves, and in the tree shifted by one the others are.
    """
    first, last, parent, position = 1, size, None, position + 1
    while (root := _root(first, last)) != position:
        left = position < root
        first, last, parent = (first, root - 1, root) if left else (root + 1, last, root)
    ranges = ((first, position - 1), (position + 1, last))
    children = [_root(a, b) for a, b in ranges if a <= b]
    at = [(r - 1 - shift) % size for r in ([] if parent is None else [parent]) + children]
    return (None, at) if parent is None else (at[0], at[1:])


def _root(first: int, last: int) -> int:
    """The number from `first` to `last` that divides by the highest power of two."""
    step = 1 << (((first - 1) ^ last).bit_length() - 1)
    return last // step * step
