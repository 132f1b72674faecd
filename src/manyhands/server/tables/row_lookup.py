"""Row lookup: the rows that a pull found, kept for the push of the same ids that usually follows.

The push then needs no second lookup. Entries of the index move only when it grows or rows are
erased; the storage counts that (`moves`), and lookups made before are void.
"""

import numpy as np

from manyhands.kernels.compile import compiled


@compiled
def equal(a, b):
    """Whether two arrays, not empty and of one length, hold the same numbers."""
    differ = a[0] ^ b[0]
    for i in range(a.size):
        differ |= a[i] ^ b[i]
    return differ == 0


class RowLookup:
    """Rows and index entries of the ids of one pull. `moves` is -1 where some id had no row."""

    def __init__(self, n: int):
        self.hashes, self.rows = np.empty(n, np.uint64), np.empty(n, np.int64)
        self.entries_at = np.empty(n, np.int64)
        self.count, self.moves = 0, -1

    def matches(self, hashes: np.ndarray, moves: int) -> bool:
        n = hashes.size  # hashing is one to one, so equal hashes are equal ids
        if self.count != n or self.moves != moves or not n or self.hashes[0] != hashes[0]:
            return False
        return bool(equal(self.hashes[:n], hashes))
