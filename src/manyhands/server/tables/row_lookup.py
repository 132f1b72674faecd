"""What a pull found, for the push of the same ids that nearly always follows: it need not look for them again.

Entries move only when the index grows or rows are forgotten; a table counts that, and what was found before is void.
"""

import numpy as np

from manyhands.kernels.compile import compiled
from manyhands.kernels.instructions import prefetch
from manyhands.server.tables.kernels import (
    AHEAD_INDEX,
    MOST_COUNTED,
    U32,
    U64,
)


@compiled
def note(entries, places, known, first, rows, now):
    """As `seek` with `push`, for ids whose entries and rows are `known` from a pull: the ones at `first`."""
    n = first.size
    for i in range(min(n, AHEAD_INDEX)):
        prefetch(entries, U64(places[first[i]]), 0)
    for i in range(n):
        if i + AHEAD_INDEX < n:
            prefetch(entries, U64(places[first[i + AHEAD_INDEX]]), 0)
        at = U64(places[first[i]])
        entry = entries[at]
        rows[i] = known[first[i]]
        count = min((entry >> U64(32)) & U64(MOST_COUNTED), U64(MOST_COUNTED - 1)) + U64(1)
        entries[at] = (U64(now) << U64(44)) | (count << U64(32)) | U64(U32(entry))


@compiled
def same(a, b):
    """Whether two lists, not empty and of one length, hold the same numbers."""
    differ = a[0] ^ b[0]
    for i in range(a.size):
        differ |= a[i] ^ b[i]
    return differ == 0


class RowLookup:
    """Rows and entries of the ids of one pull."""

    def __init__(self, n: int):
        self.hashes, self.rows, self.places = (
            np.empty(n, np.uint64),
            np.empty(n, np.int64),
            np.empty(n, np.int64),
        )
        self.count, self.moves = (
            0,
            -1,
        )  # of the index, when they were found; -1: not all of them have rows

    def holds(self, hashes: np.ndarray, moves: int) -> bool:
        n = hashes.size  # a hash is made of its id one to one
        if self.count != n or self.moves != moves or not n or self.hashes[0] != hashes[0]:
            return False
        return bool(same(self.hashes[:n], hashes))
