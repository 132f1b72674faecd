"""The loops of a table, compiled by numba: one thread, no Python, no allocation.

An index of 16-byte entries, four in a cache line, leads from an id to the number of its row: a bucket is compared as a whole, without
a branch that could be guessed wrong, and what does not fit goes to the next. Any number of buckets: the upper half of the hash is
scaled to it, so entries stand nearly in the order of their hashes and growing reads and writes in sequence.

    entry    id (64 bits) | last push (20), pushes (12), row + 1 (32);   all zero: empty, as fresh memory is

A row is `dim` values followed by what the rule keeps of them, in one piece of memory. Lookups and copies ask for the cache lines of
later ids before they need them: this, and not the arithmetic, decides the speed. Offsets are unsigned and rows are 1-D slices, since
signed indices and 2-D indexing cost numba a check for negative numbers in every access.
"""

import hashlib

import numpy as np

from manyhands.kernels.compile import compiled, inlined
from manyhands.kernels.instructions import (
    copy,
    lowest,
    match,
    prefetch,
)

U64, U32 = np.uint64, np.uint32

NOWHERE = np.int64(-1)  # the row of an id that has none
COUNT_BITS, LAST_BITS = 12, 20
MOST_COUNTED = (1 << COUNT_BITS) - 1
LATEST = (1 << LAST_BITS) - 1
AHEAD_INDEX, AHEAD_ROWS, AHEAD_PUSH = (
    64,
    32,
    16,
)  # how many ids before their use lines are asked for

# `head`: the few numbers of a table that its kernels share, by position
TOP, FREE, LIVE, REFUSED, UNADMITTED, SIGHTED, ROOM, MOST, NOW, ADMIT_AFTER, INIT, HEAD = range(12)
# FREE: 1 + the first of the rows that were given back; each of them holds the next. ROOM: entries before the index must grow.
ZEROS, UNIFORM, NORMAL = range(3)
INITS = {"zeros": ZEROS, "uniform": UNIFORM, "normal": NORMAL}


# -- hashes: the same on every machine and in every process --


def seed_of(name: str, seed: int = 0) -> int:
    """64 bits for a table: of its name alone for where its rows are, with its seed for what they start as."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little"
    )


@inlined
def mix(x):
    """64 bits to 64 bits, each of which depends on all (MurmurHash3's finisher)."""
    x = U64(x)
    x = (x ^ (x >> U64(33))) * U64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> U64(33))) * U64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> U64(33))


@inlined
def _mix32(x):
    x = U32(x)
    x = U32((x ^ (x >> U32(16))) * U32(0x85EBCA6B))
    x = U32((x ^ (x >> U32(13))) * U32(0xC2B2AE35))
    return U32(x ^ (x >> U32(16)))


@compiled
def _slots(ids, seed, mask, out):
    for i in range(ids.size):
        out[i] = mix(U64(ids[i]) ^ seed) & mask


def hash64(name: str, number: int) -> int:
    """Of one row: decides its slot (lower bits) and its place in the index (upper bits)."""
    return int(mix(U64((number ^ seed_of(name)) & 0xFFFFFFFFFFFFFFFF)))


def slot_of(ids: np.ndarray, table_seed: int, slots: int) -> np.ndarray:
    """The slots (a power of two of them) of ids; `table_seed` is `seed_of(name)`."""
    assert slots & (slots - 1) == 0, slots
    out = np.empty(ids.size, np.int64)
    _slots(ids, U64(table_seed), U64(slots - 1), out)
    return out


@compiled
def hash_all(ids, seed, hashes):
    for i in range(ids.size):
        hashes[i] = mix(U64(ids[i]) ^ seed)


@inlined
def _home(hashed, buckets):
    """Where in the index the bucket of a hash begins."""
    return (((hashed >> U64(32)) * buckets) >> U64(32)) << U64(3)


@inlined
def _next(bucket, size):
    bucket += U64(8)
    return bucket if bucket < size else U64(0)


@inlined
def _look(entries, bucket, wanted):
    """Whether an id is there; where its entry's second half is, or else the bucket that has room for it."""
    size = U64(entries.size)
    while True:
        bits = match(entries, bucket, wanted)
        if bits != 0:
            at = bucket + lowest(bits) + U64(1)
            if U32(entries[at]) != 0:  # the empty ones come last and look like the id 0
                return True, at
        if U32(entries[bucket + U64(7)]) == 0:
            return False, bucket
        bucket = _next(bucket, size)


@inlined
def _place(entries, bucket, wanted, entry):
    """Write an entry into a bucket that has room for it."""
    at = bucket
    while U32(entries[at + U64(1)]) != 0:
        at += U64(2)
    entries[at] = wanted
    entries[at + U64(1)] = entry


# -- rows --


@inlined
def first_values(out, number, seed, kind, unit):
    """What the row of an id starts as: a function of the id and the seed. `unit`: what a step of 2^-31 (uniform) or a deviation
    of one (normal) is worth."""
    if kind == ZEROS:
        for j in range(out.size):
            out[j] = 0
        return
    bits = mix(U64(number) ^ seed)
    low, high = U32(bits), U32(bits >> U64(32))
    if kind == UNIFORM:
        for j in range(out.size):
            out[j] = (
                out.dtype.type(
                    np.int32(_mix32(U32(U32(low + U32(U32(j) * U32(0x9E3779B9))) ^ high)))
                )
                * unit
            )
        return
    for j in range(out.size):  # Box and Muller
        one = _mix32(U32(U32(low + U32(U32(j) * U32(0x9E3779B9))) ^ high))
        two = _mix32(U32(one ^ low))
        length = np.sqrt(-2.0 * np.log((np.float64(one) + 0.5) * 2.0**-32))
        out[j] = unit * out.dtype.type(length * np.cos(np.float64(two) * (2.0**-31 * np.pi)))


@inlined
def _new_row(head, links, link_stride):
    """The number of a row that nobody uses."""
    if head[FREE] > 0:
        row = head[FREE] - 1
        head[FREE] = links[U64(row) * U64(link_stride)]
    else:
        row = head[TOP]
        head[TOP] = row + 1
    return row


@inlined
def _seen(sketch, hashed):
    """Count one more sighting, in two places (conservatively: only the smaller grows); how many there were at the most. Others
    may share a place, so it can be too many and never too few."""
    mask = U64(sketch.size - 1)
    one, two = hashed & mask, mix(hashed) & mask
    seen = min(sketch[one], sketch[two])
    if seen < 65535:
        seen += 1
        sketch[one] = max(sketch[one], seen)
        sketch[two] = max(sketch[two], seen)
    return seen


@inlined
def _ask_for(entries, bucket):
    """And for the bucket after it: one id in sixteen did not find room in its own."""
    prefetch(entries, bucket, 0)
    prefetch(entries, bucket, 1)


@compiled
def seek(entries, ids, hashes, rows, places, push, now):
    """Write the rows of ids to `rows`, NOWHERE for those that have none, and where their entries are to `places`; how many have
    none. With `push`, note it in the entries."""
    n, buckets, missing = ids.size, U64(entries.size // 8), 0
    for i in range(n):
        rows[i] = np.int64(_home(hashes[i], buckets))  # until it is replaced by the row
    for i in range(min(n, AHEAD_INDEX)):
        _ask_for(entries, U64(rows[i]))
    for i in range(n):
        if i + AHEAD_INDEX < n:
            _ask_for(entries, U64(rows[i + AHEAD_INDEX]))
        there, at = _look(entries, U64(rows[i]), U64(ids[i]))
        if there:
            entry = entries[at]
            rows[i] = np.int64(U32(entry)) - 1
            places[i] = np.int64(at)
            if push:
                count = min((entry >> U64(32)) & U64(MOST_COUNTED), U64(MOST_COUNTED - 1)) + U64(1)
                entries[at] = (U64(now) << U64(44)) | (count << U64(32)) | U64(U32(entry))
        else:
            rows[i] = NOWHERE
            missing += 1
    return missing


@compiled
def enter(
    entries,
    head,
    seeds,
    ids,
    hashes,
    begin,
    end,
    rows,
    push,
    slab,
    links,
    dim,
    stride,
    blank,
    unit,
    sketch,
    force,
):
    """Make the rows of ids[begin:end] that `seek` found nowhere and that may be made. Stops where the index or the slab must grow
    first; the first id that was not entered."""
    buckets, value_seed, share = U64(entries.size // 8), seeds[1], seeds[2]
    for i in range(begin, end):
        if rows[i] != NOWHERE:
            continue
        wanted, hashed = U64(ids[i]), hashes[i]
        there, at = _look(entries, _home(hashed, buckets), wanted)
        if there:  # it stood before in these ids
            rows[i] = np.int64(U32(entries[at])) - 1
            continue
        if not force:
            if share != U64(0xFFFFFFFFFFFFFFFF) and mix(hashed ^ value_seed) >= share:
                head[UNADMITTED] += push
                continue
            if head[ADMIT_AFTER] > 1 and (not push or _seen(sketch, hashed) < head[ADMIT_AFTER]):
                head[UNADMITTED] += push
                head[SIGHTED] += push
                continue
        if head[LIVE] >= head[MOST]:
            head[REFUSED] += push
            continue
        if head[LIVE] >= head[ROOM] or (
            head[FREE] == 0 and U64(head[TOP] + 1) * U64(stride) > U64(slab.size)
        ):
            return i
        row = _new_row(head, links, stride * (links.size // slab.size))
        head[LIVE] += 1
        _place(
            entries, at, wanted, (U64(head[NOW]) << U64(44)) | (U64(push) << U64(32)) | U64(row + 1)
        )
        rows[i] = row
        start = U64(row) * U64(stride)
        first_values(slab[start : start + U64(dim)], ids[i], value_seed, head[INIT], unit)
        kept = slab[start + U64(dim) : start + U64(stride)]
        for j in range(kept.size):
            kept[j] = blank[j]
    return end


@inlined
def lines_of(array, width, stride):
    """How many cache lines so many elements touch at the most, in rows of `stride`."""
    return (width * array.itemsize + 63) // 64 + ((stride * array.itemsize) % 64 != 0)


@compiled
def gather(slab, rows, out, dim, stride):
    """Copy rows out; how many of them were NOWHERE and are left as they are."""
    n, missing, lines = rows.size, 0, lines_of(slab, dim, stride)
    for i in range(n):
        if i + AHEAD_ROWS < n:
            later = U64(rows[i + AHEAD_ROWS]) * U64(stride)
            for j in range(lines):
                prefetch(slab, later, j)
        if rows[i] == NOWHERE:
            missing += 1
        else:
            copy(out, U64(i) * U64(dim), slab, U64(rows[i]) * U64(stride), U64(dim))
    return missing


@compiled
def gather_first(rows, out, dim, ids, seed, kind, unit):
    """What `gather` left reads as it would start."""
    for i in range(rows.size):
        if rows[i] == NOWHERE:
            first_values(out[U64(i) * U64(dim) : U64(i + 1) * U64(dim)], ids[i], seed, kind, unit)


# -- pushes: ids that repeat are summed, and what is not finite is found, before anything changes --


@inlined
def _finite(values):
    """Whether no value is NaN or infinite: by the largest exponent, which vectorises."""
    bits = values.view(np.uint32)
    largest = U32(0)
    if values.itemsize == 4:
        for j in range(bits.size):
            largest = max(largest, U32(bits[j] & U32(0x7F800000)))
        return largest != U32(0x7F800000)
    for j in range(values.size):
        largest = max(largest, U32(bits[2 * j + 1] & U32(0x7FF00000)))
    return largest != U32(0x7FF00000)


@compiled
def finite(values):
    good = True
    for start in range(0, values.size, 4096):
        good = good and _finite(values[start : start + 4096])
    return good


@compiled
def unite(ids, hashes, grads, dim, places, distinct, distinct_hashes, first):
    """Sum the gradients of equal ids into the first of them: `distinct` ids and where each stands. How many; -1: something is not
    finite. `places`: a power of two of them, at least twice as many as ids."""
    mask, dim, found = U64(places.size - 1), U64(dim), 0
    if not finite(grads):
        return -1
    places[:] = -1
    for i in range(ids.size):
        wanted = ids[i]
        at = hashes[i] & mask
        while True:
            p = places[at]
            if p < 0:
                places[at] = found
                distinct[found] = wanted
                distinct_hashes[found] = hashes[i]
                first[found] = i
                found += 1
                break
            if distinct[U64(p)] == wanted:
                start = U64(first[U64(p)]) * dim
                total, mine = grads[start : start + dim], grads[U64(i) * dim : U64(i) * dim + dim]
                for j in range(total.size):
                    total[j] += mine[j]
                if not _finite(total):
                    return -1
                break
            at = (at + U64(1)) & mask
    return found


# -- the index as a whole --


@compiled
def regrow(old, entries, seed):
    """Put all entries into a larger, empty index."""
    buckets = U64(entries.size // 8)
    for i in range(0, old.size, 2):
        entry = old[U64(i) + U64(1)]
        if U32(entry) == 0:
            continue
        bucket = _home(mix(old[U64(i)] ^ seed), buckets)
        while U32(entries[bucket + U64(7)]) != 0:
            bucket = _next(bucket, U64(entries.size))
        _place(entries, bucket, old[U64(i)], entry)


@compiled
def erase(entries, head, seed, ids, links, link_stride):
    """Forget rows. What had to go past a full bucket comes back into it, so that no grave is left and lookups stay short."""
    buckets, size, erased = U64(entries.size // 8), U64(entries.size), 0
    for i in range(ids.size):
        wanted = U64(ids[i])
        there, at = _look(entries, _home(mix(wanted ^ seed), buckets), wanted)
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
            last = (
                bucket  # of the entries of this bucket goes into the hole: the empty ones come last
            )
            while last < bucket + U64(6) and U32(entries[last + U64(3)]) != 0:
                last += U64(2)
            entries[hole] = entries[last]
            entries[hole + U64(1)] = entries[last + U64(1)]
            entries[last] = U64(0)
            entries[last + U64(1)] = U64(0)
            if not full:
                break
            hole, other, found = last, _next(bucket, size), False
            while not found:
                for at in range(other, other + U64(8), U64(2)):
                    if U32(entries[at + U64(1)]) == 0:
                        break
                    home = _home(mix(entries[at] ^ seed), buckets)
                    # it may come back unless its home lies behind this bucket, up to where it stands (on the circle)
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
                other = _next(other, size)
            if not found:
                break
    return erased


@compiled
def listed(entries, seed, mask, slot, ids, rows, meta):
    """The ids, rows and (last, count) of all entries of one slot (any, where `slot` is negative); how many. Only counts where
    `ids` is empty."""
    found = 0
    for i in range(U64(0), U64(entries.size), U64(2)):
        entry = entries[i + U64(1)]
        if U32(entry) == 0 or (slot >= 0 and np.int64(mix(entries[i] ^ seed) & mask) != slot):
            continue
        if ids.size > 0:
            ids[found] = np.int64(entries[i])
            rows[found] = np.int64(U32(entry)) - 1
            meta[2 * found] = np.int64((entry >> U64(32)) & U64(MOST_COUNTED))
            meta[2 * found + 1] = np.int64(entry >> U64(44))
        found += 1
    return found


@compiled
def stale(entries, slab, dim, stride, oldest, least, shortest, ids):
    """The ids of rows last pushed before `oldest`, or pushed fewer than `least` times, or of a norm below `shortest`; how many."""
    found = 0
    for i in range(U64(0), U64(entries.size), U64(2)):
        entry = entries[i + U64(1)]
        if U32(entry) == 0:
            continue
        gone = (
            np.int64(entry >> U64(44)) < oldest
            or np.int64((entry >> U64(32)) & U64(MOST_COUNTED)) < least
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
def rebase(entries, back):
    """Count the last pushes from `back` later on; what is older than can be written stays at 0."""
    for i in range(U64(1), U64(entries.size), U64(2)):
        last = min(max(np.int64(entries[i] >> U64(44)) - back, 0), LATEST)
        entries[i] = (entries[i] & U64(0x00000FFFFFFFFFFF)) | (U64(last) << U64(44))


@compiled
def set_meta(entries, seed, ids, meta):
    """Write (count, last) of rows that are there."""
    buckets = U64(entries.size // 8)
    for i in range(ids.size):
        _, at = _look(entries, _home(mix(U64(ids[i]) ^ seed), buckets), U64(ids[i]))
        entries[at] = (
            (U64(meta[2 * i + 1]) << U64(44))
            | (U64(meta[2 * i]) << U64(32))
            | U64(U32(entries[at]))
        )
