"""Index kernels of a sparse table: find the row of an id, and insert ids that have none.

The index is a hash table of 16-byte entries, four in a cache line (a bucket). A bucket is compared
as a whole, without a branch that could be mispredicted; an id that does not fit goes to the next
bucket. The number of buckets is arbitrary: the upper half of the hash is scaled to it, so entries
are nearly in the order of their hashes, and growing the index reads and writes in sequence.

    entry    id (64 bits) | last push (20), pushes (12), row + 1 (32);   all zero: empty

Lookups prefetch the cache lines of later ids: this, and not the arithmetic, decides the speed.
"""

import numpy as np

from manyhands.kernels.compile import U32, U64, compiled, inlined
from manyhands.kernels.instructions import lowest, match, prefetch
from manyhands.server.tables.hashing import mix
from manyhands.server.tables.row_kernels import NOWHERE, first_values

COUNT_BITS, LAST_BITS = 12, 20
MAX_COUNT = (1 << COUNT_BITS) - 1  # pushes of a row are counted up to this
LATEST = (1 << LAST_BITS) - 1  # the latest time of a push that an entry can hold
PREFETCH_INDEX = 64  # ids between the prefetch of a bucket and its use

# `head`: the numbers of a table that its kernels share, by position.
# TOP: rows ever used. FREE: 1 + the first erased row; each erased row holds the next one.
# LIVE: rows in use. REFUSED, UNADMITTED: gradients dropped, for memory or by admission.
# SIGHTED: ids counted by admission. CAPACITY: entries before the index must grow.
# MAX_ROWS: the memory limit. NOW: time of this push.
TOP, FREE, LIVE, REFUSED, UNADMITTED, SIGHTED = range(6)
CAPACITY, MAX_ROWS, NOW, ADMIT_AFTER, INIT, HEAD_SIZE = range(6, 12)


@inlined
def home_of(hashed, buckets):
    """Where in the index the bucket of a hash begins."""
    return (((hashed >> U64(32)) * buckets) >> U64(32)) << U64(3)


@inlined
def next_bucket(bucket, size):
    bucket += U64(8)
    return bucket if bucket < size else U64(0)


@inlined
def look_up(entries, bucket, wanted):
    """(True, position of the second half of the id's entry), or (False, a bucket with room)."""
    size = U64(entries.size)
    while True:
        bits = match(entries, bucket, wanted)
        if bits != 0:
            at = bucket + lowest(bits) + U64(1)
            if U32(entries[at]) != 0:  # empty entries come last and look like id 0
                return True, at
        if U32(entries[bucket + U64(7)]) == 0:
            return False, bucket
        bucket = next_bucket(bucket, size)


@inlined
def write_entry(entries, bucket, wanted, entry):
    """Write an entry into a bucket that has room for it."""
    at = bucket
    while U32(entries[at + U64(1)]) != 0:
        at += U64(2)
    entries[at] = wanted
    entries[at + U64(1)] = entry


@inlined
def _pushed(entry, now):
    """An entry after one more push: counted, and with its time."""
    count = min((entry >> U64(32)) & U64(MAX_COUNT), U64(MAX_COUNT - 1)) + U64(1)
    return (U64(now) << U64(44)) | (count << U64(32)) | U64(U32(entry))


@inlined
def _prefetch_bucket(entries, bucket):
    """Also the bucket after it: one id in sixteen did not fit into its own."""
    prefetch(entries, bucket, 0)
    prefetch(entries, bucket, 1)


@compiled
def find_rows(entries, ids, hashes, rows, entries_at, push, now):
    """Write the rows of ids to `rows` (NOWHERE: none) and the positions of their entries.

    Returns how many have no row. With `push`, counts a push in each entry.
    """
    n, buckets, missing = ids.size, U64(entries.size // 8), 0
    for i in range(n):
        rows[i] = np.int64(home_of(hashes[i], buckets))  # until it is replaced by the row
    for i in range(min(n, PREFETCH_INDEX)):
        _prefetch_bucket(entries, U64(rows[i]))
    for i in range(n):
        if i + PREFETCH_INDEX < n:
            _prefetch_bucket(entries, U64(rows[i + PREFETCH_INDEX]))
        there, at = look_up(entries, U64(rows[i]), U64(ids[i]))
        if there:
            entry = entries[at]
            rows[i] = np.int64(U32(entry)) - 1
            entries_at[i] = np.int64(at)
            if push:
                entries[at] = _pushed(entry, now)
        else:
            rows[i] = NOWHERE
            missing += 1
    return missing


@compiled
def count_pushes(entries, entries_at, known_rows, first, rows, now):
    """As `find_rows` with `push`, for the ids at `first`, whose entries and rows a pull found."""
    n = first.size
    for i in range(min(n, PREFETCH_INDEX)):
        prefetch(entries, U64(entries_at[first[i]]), 0)
    for i in range(n):
        if i + PREFETCH_INDEX < n:
            prefetch(entries, U64(entries_at[first[i + PREFETCH_INDEX]]), 0)
        at = U64(entries_at[first[i]])
        entry = entries[at]
        rows[i] = known_rows[first[i]]
        entries[at] = _pushed(entry, now)


@inlined
def _new_row(head, links, link_stride):
    """The number of a row that is not in use."""
    if head[FREE] > 0:
        row = head[FREE] - 1
        head[FREE] = links[U64(row) * U64(link_stride)]
    else:
        row = head[TOP]
        head[TOP] = row + 1
    return row


@inlined
def _count_sighting(sketch, hashed):
    """Count an id once more in a count-min sketch of two rows, conservatively (the smaller grows).

    Returns the count. Ids may share counters, so it can be too large and never too small.
    """
    mask = U64(sketch.size - 1)
    one, two = hashed & mask, mix(hashed) & mask
    seen = min(sketch[one], sketch[two])
    if seen < 65535:
        seen += 1
        sketch[one] = max(sketch[one], seen)
        sketch[two] = max(sketch[two], seen)
    return seen


@inlined
def _refused(head, sketch, hashed, value_seed, share, push):
    """Whether admission keeps a new id out; counts its gradient as dropped."""
    if share != U64(0xFFFFFFFFFFFFFFFF) and mix(hashed ^ value_seed) >= share:
        head[UNADMITTED] += push
        return True
    if head[ADMIT_AFTER] > 1 and (not push or _count_sighting(sketch, hashed) < head[ADMIT_AFTER]):
        head[UNADMITTED] += push
        head[SIGHTED] += push
        return True
    return False


# fmt: off
@compiled
def insert_rows(
    entries, head, seeds, ids, hashes, begin, end, rows, push,
    slab, links, dim, stride, blank, unit, sketch, force,
):
    """Make the rows of ids[begin:end] that `find_rows` found NOWHERE, where admission allows it.

    Stops where the index or the slab must grow first; returns the first id that was not inserted.
    """
    # fmt: on
    buckets, value_seed, share = U64(entries.size // 8), seeds[1], seeds[2]
    for i in range(begin, end):
        if rows[i] != NOWHERE:
            continue
        wanted, hashed = U64(ids[i]), hashes[i]
        there, at = look_up(entries, home_of(hashed, buckets), wanted)
        if there:  # the same id came earlier in `ids`
            rows[i] = np.int64(U32(entries[at])) - 1
            continue
        if not force and _refused(head, sketch, hashed, value_seed, share, push):
            continue
        if head[LIVE] >= head[MAX_ROWS]:
            head[REFUSED] += push
            continue
        if head[LIVE] >= head[CAPACITY] or (
            head[FREE] == 0 and U64(head[TOP] + 1) * U64(stride) > U64(slab.size)
        ):
            return i
        row = _new_row(head, links, stride * (links.size // slab.size))
        head[LIVE] += 1
        entry = (U64(head[NOW]) << U64(44)) | (U64(push) << U64(32)) | U64(row + 1)
        write_entry(entries, at, wanted, entry)
        rows[i] = row
        start = U64(row) * U64(stride)
        first_values(slab[start : start + U64(dim)], ids[i], value_seed, head[INIT], unit)
        kept = slab[start + U64(dim) : start + U64(stride)]
        for j in range(kept.size):
            kept[j] = blank[j]
    return end
