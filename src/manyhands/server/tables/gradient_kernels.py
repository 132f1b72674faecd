"""Gradient kernels: check that pushed gradients are finite and sum those of equal ids.

Both run before a push changes anything, so a push can be refused as a whole.
"""

import numpy as np

from manyhands.kernels.compile import U32, U64, compiled, inlined


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
def sum_duplicates(ids, hashes, grads, dim, buckets, distinct, distinct_hashes, first):
    """Sum the gradients of equal ids into the first of them.

    Writes the `distinct` ids and where each appears `first`; returns how many there are, or -1 when
    a gradient is not finite. `buckets`: a power of two of them, at least twice as many as ids.
    """
    mask, dim, found = U64(buckets.size - 1), U64(dim), 0
    if not finite(grads):
        return -1
    buckets[:] = -1
    for i in range(ids.size):
        wanted = ids[i]
        at = hashes[i] & mask
        while True:
            p = buckets[at]
            if p < 0:
                buckets[at] = found
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
