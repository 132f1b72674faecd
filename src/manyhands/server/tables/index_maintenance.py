"""Index maintenance of a sparse table: rebuild, erase, list, expire; passes over the whole index.

Entries are those of `index_kernels`. None of this runs per id of a pull or a push.
"""

import numpy as np

from manyhands.kernels.compile import U32, U64, compiled
from manyhands.server.tables.hashing import mix
from manyhands.server.tables.index_kernels import (
    FREE,
    LATEST,
    LIVE,
    MAX_COUNT,
    home_of,
    look_up,
    next_bucket,
    write_entry,
)


@compiled
def rebuild(old, entries, seed):
    """Put all entries into a larger, empty index."""
    buckets = U64(entries.size // 8)
    for i in range(0, old.size, 2):
        entry = old[U64(i) + U64(1)]
        if U32(entry) == 0:
            continue
        bucket = home_of(mix(old[U64(i)] ^ seed), buckets)
        while U32(entries[bucket + U64(7)]) != 0:
            bucket = next_bucket(bucket, U64(entries.size))
        write_entry(entries, bucket, old[U64(i)], entry)


@compiled
def erase(entries, head, seed, ids, links, link_stride):
    """Erase the rows of ids; returns how many there were.

    An entry that had overflowed past the bucket moves back into the hole, so no tombstone is left
    and lookups stay short.
    """
    buckets, size, erased = U64(entries.size // 8), U64(entries.size), 0
    for i in range(ids.size):
        wanted = U64(ids[i])
        there, at = look_up(entries, home_of(mix(wanted ^ seed), buckets), wanted)
        if not there:
            continue
        row = np.int64(U32(entries[at])) - 1
        links[U64(row) * U64(link_stride)] = head[FREE]
        head[FREE] = row + 1
        head[LIVE] -= 1
        erased += 1
        hole = at - U64(1)
        while True:
            bucket = hole & ~U64(7)
            full = U32(entries[bucket + U64(7)]) != 0
            # the last entry of this bucket moves into the hole, since empty ones come last
            last = bucket
            while last < bucket + U64(6) and U32(entries[last + U64(3)]) != 0:
                last += U64(2)
            entries[hole] = entries[last]
            entries[hole + U64(1)] = entries[last + U64(1)]
            entries[last] = U64(0)
            entries[last + U64(1)] = U64(0)
            if not full:
                break
            hole, other, found = last, next_bucket(bucket, size), False
            while not found:
                for at in range(other, other + U64(8), U64(2)):
                    if U32(entries[at + U64(1)]) == 0:
                        break
                    home = home_of(mix(entries[at] ^ seed), buckets)
                    # it may move unless its home is after this bucket, up to where it is (cyclic)
                    behind = (
                        (bucket < home and home <= other)
                        if bucket < other
                        else (bucket < home or home <= other)
                    )
                    if not behind:
                        entries[hole] = entries[at]
                        entries[hole + U64(1)] = entries[at + U64(1)]
                        hole, found = at, True
                        break
                if U32(entries[other + U64(7)]) == 0:
                    break
                other = next_bucket(other, size)
            if not found:
                break
    return erased


@compiled
def list_entries(entries, seed, mask, slot, ids, rows, meta):
    """Write the ids, rows and (count, last push) of all entries of one slot (negative: of any).

    Returns how many there are. Where `ids` is empty, it only counts.
    """
    found = 0
    for i in range(U64(0), U64(entries.size), U64(2)):
        entry = entries[i + U64(1)]
        if U32(entry) == 0 or (slot >= 0 and np.int64(mix(entries[i] ^ seed) & mask) != slot):
            continue
        if ids.size > 0:
            ids[found] = np.int64(entries[i])
            rows[found] = np.int64(U32(entry)) - 1
            meta[2 * found] = np.int64((entry >> U64(32)) & U64(MAX_COUNT))
            meta[2 * found + 1] = np.int64(entry >> U64(44))
        found += 1
    return found


@compiled
def list_expired(entries, slab, dim, stride, oldest, least, shortest, ids):
    """Write the ids of expired rows; returns how many there are.

    Expired: last pushed before `oldest`, pushed fewer than `least` times, or with a norm below
    `shortest`.
    """
    found = 0
    for i in range(U64(0), U64(entries.size), U64(2)):
        entry = entries[i + U64(1)]
        if U32(entry) == 0:
            continue
        gone = (
            np.int64(entry >> U64(44)) < oldest
            or np.int64((entry >> U64(32)) & U64(MAX_COUNT)) < least
        )
        if not gone and shortest > 0.0:
            start, square = U64(U32(entry) - U32(1)) * U64(stride), 0.0
            for x in slab[start : start + U64(dim)]:
                square += np.float64(x) * np.float64(x)
            gone = square < shortest * shortest
        if gone:
            ids[found] = np.int64(entries[i])
            found += 1
    return found


@compiled
def shift_times(entries, back):
    """Subtract `back` from the time of every last push; what becomes negative is written as 0."""
    for i in range(U64(1), U64(entries.size), U64(2)):
        last = min(max(np.int64(entries[i] >> U64(44)) - back, 0), LATEST)
        entries[i] = (entries[i] & U64(0x00000FFFFFFFFFFF)) | (U64(last) << U64(44))


@compiled
def write_meta(entries, seed, ids, meta):
    """Write (count, last push) of rows that exist."""
    buckets = U64(entries.size // 8)
    for i in range(ids.size):
        _, at = look_up(entries, home_of(mix(U64(ids[i]) ^ seed), buckets), U64(ids[i]))
        entries[at] = (
            (U64(meta[2 * i + 1]) << U64(44))
            | (U64(meta[2 * i]) << U64(32))
            | U64(U32(entries[at]))
        )
