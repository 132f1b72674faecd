"""Codec kernels: encode and decode gradients on a CPU. One thread, float32, contiguous 1-D arrays.

Each kernel works through blocks that stay in the first-level cache, so several simple passes, which
the compiler turns into vector instructions, cost one pass over memory. Error feedback is part of
the encoding pass:

    p = g + e;   q = C(p);   e = p - q     (e holds p while a block is worked on: no third array)

Magnitudes are compared as integers (the bits of |x| order like |x|). This vectorises without
assumptions about NaN, and puts NaN above everything: it is found, never lost. A block with NaN or
infinity is encoded as NaN and leaves no residual.
"""

import numpy as np

from manyhands.kernels.compile import compiling

MAGNITUDE = np.uint32(0x7FFFFFFF)  # all but the sign
INFINITE = np.uint32(0x7F800000)  # and above: NaN
TINY = np.float32(1.1754944e-38)  # below this 1/x overflows
ZERO, ONE = np.float32(0), np.float32(1)
LEVELS = np.float32(127)
CHUNK = 32  # elements whose largest is compared before each one is

compiled = compiling()
summing = compiling(fastmath={"reassoc", "nsz"})  # sums in vector order; NaN stays NaN


@compiled
def _largest(bits):
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, np.uint32(bits[i] & MAGNITUDE))
    return largest


# -- int8: codes in [-127, 127] times one scale a block --


@compiled
def _scale(bits, word, number):
    """max|x| / 127; NaN where a value is not finite.

    `word` and `number` are one array seen as uint32 and as float32.
    """
    word[0] = _largest(bits)
    if word[0] >= INFINITE:
        return np.float32(np.nan)
    scale = number[0] / LEVELS
    return scale if scale >= TINY else ZERO


@compiled
def int8_encode(x, scales, codes, block):
    bits, word = x.view(np.uint32), np.empty(1, np.uint32)
    number = word.view(np.float32)
    for b in range(scales.size):
        part = slice(b * block, min(x.size, (b + 1) * block))
        p, c = x[part], codes[part]
        scale = _scale(bits[part], word, number)
        scales[b] = scale
        if not scale > ZERO:
            c[:] = 0
            continue
        inverse = ONE / scale
        for i in range(p.size):
            c[i] = np.int8(np.rint(p[i] * inverse))


@compiled
def int8_encode_feedback(x, error, scales, codes, block):
    bits, word = error.view(np.uint32), np.empty(1, np.uint32)
    number = word.view(np.float32)
    for b in range(scales.size):
        part = slice(b * block, min(x.size, (b + 1) * block))
        g, p, c = x[part], error[part], codes[part]
        for i in range(p.size):
            p[i] += g[i]
        scale = _scale(bits[part], word, number)
        scales[b] = scale
        if not scale > ZERO:
            c[:] = 0
            if scale != scale:
                p[:] = ZERO
            continue
        inverse = ONE / scale
        for i in range(p.size):
            q = np.rint(p[i] * inverse)
            c[i] = np.int8(q)
            p[i] -= q * scale


@compiled
def int8_encode_stochastic(x, scales, codes, block, seed):
    bits, word = x.view(np.uint32), np.empty(1, np.uint32)
    number = word.view(np.float32)
    for b in range(scales.size):
        start = b * block
        part = slice(start, min(x.size, start + block))
        p, c = x[part], codes[part]
        scale = _scale(bits[part], word, number)
        scales[b] = scale
        if not scale > ZERO:
            c[:] = 0
            continue
        inverse = ONE / scale
        for i in range(p.size):
            # a counter hashed to 24 random bits (Wellons' lowbias32): without state, so that a
            # step can be repeated
            h = np.uint32(np.uint32(start + i) ^ np.uint32(seed))
            h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D))
            h = np.uint32(np.uint32(h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B))
            h = np.uint32(h ^ (h >> np.uint32(16)))
            chance = np.float32(np.int32(h >> np.uint32(8))) * np.float32(2.0**-24)
            c[i] = np.int8(min(max(np.floor(p[i] * inverse + chance), -LEVELS), LEVELS))


@compiled
def int8_decode(scales, codes, out, block):
    for b in range(scales.size):
        part = slice(b * block, min(out.size, (b + 1) * block))
        c, o, scale = codes[part], out[part], scales[b]
        for i in range(o.size):
            o[i] = np.float32(c[i]) * scale


@compiled
def int8_decode_add(scales, codes, total, block):
    for b in range(scales.size):
        part = slice(b * block, min(total.size, (b + 1) * block))
        c, o, scale = codes[part], total[part], scales[b]
        for i in range(o.size):
            o[i] += np.float32(c[i]) * scale


# -- one bit: the sign, and per block the means of its positive (and zero) and negative values --


@summing
def _sums(p):
    """sum p, sum |p|: half their sum is the positive part, half their difference the negative."""
    plain, absolute = ZERO, ZERO
    for i in range(p.size):
        plain += p[i]
        absolute += abs(p[i])
    return plain, absolute


@compiled
def onebit_encode(x, error, means, signs, block):
    flags = np.zeros((block + 7) // 8 * 8, np.uint8)
    eights = flags.view(np.uint64)
    for b in range(means.shape[0]):
        start, stop = b * block, min(x.size, (b + 1) * block)
        g, p, packed = x[start:stop], error[start:stop], signs[start // 8 : (stop + 7) // 8]
        for i in range(p.size):
            p[i] += g[i]
        flags[p.size :] = 0
        positive = np.int32(0)
        for i in range(p.size):
            flags[i] = np.uint8(p[i] >= ZERO)
            positive += np.int32(flags[i])
        plain, absolute = _sums(p)
        high = (absolute + plain) / np.float32(2 * max(positive, np.int32(1)))
        low = (plain - absolute) / np.float32(2 * max(p.size - positive, 1))
        means[b, 0], means[b, 1] = high, low
        for j in range(packed.size):  # the product moves bit 8i to bit 56 + i
            packed[j] = np.uint8((eights[j] * np.uint64(0x0102040810204080)) >> np.uint64(56))
        if np.isfinite(high) and np.isfinite(low):
            for i in range(p.size):
                p[i] -= high if p[i] >= ZERO else low
        else:
            p[:] = ZERO


@compiled
def onebit_decode(means, signs, out, block, add):
    flags = np.empty((block + 7) // 8 * 8, np.uint8)
    eights = flags.view(np.uint64)
    for b in range(means.shape[0]):
        start, stop = b * block, min(out.size, (b + 1) * block)
        o, packed = out[start:stop], signs[start // 8 : (stop + 7) // 8]
        high, low = means[b, 0], means[b, 1]
        for j in range(packed.size):  # the byte eight times, of each copy one bit
            eights[j] = (np.uint64(packed[j]) * np.uint64(0x0101010101010101)) & np.uint64(
                0x8040201008040201
            )
        if add:
            for i in range(o.size):
                o[i] += high if flags[i] != 0 else low
        else:
            for i in range(o.size):
                o[i] = high if flags[i] != 0 else low


# -- top-k --


@compiled
def accelerate(g, u, v, mu):
    """u = mu u + g;   v = v + u"""
    mu = np.float32(mu)
    for i in range(g.size):
        now = mu * u[i] + g[i]
        u[i] = now
        v[i] += now


@compiled
def _at_least(bits, low, index, magnitude):
    """Write, in order and while there is room, where the magnitude is `low` or more.

    Returns how many there are.
    """
    found = 0
    for start in range(0, bits.size, CHUNK):
        chunk = bits[start : min(bits.size, start + CHUNK)]
        if _largest(chunk) >= low:
            for i in range(chunk.size):
                m = np.uint32(chunk[i] & MAGNITUDE)
                if m >= low:
                    if found < index.size:
                        index[found] = start + i
                        magnitude[found] = m
                    found += 1
    return found


@compiled
def _kth(bits, k):
    """The k-th largest magnitude, and how many are above it.

    Two passes: by the upper 16 bits, then by the 15 below.
    """
    count = np.zeros(1 << 16, np.int64)
    for i in range(bits.size):
        count[(bits[i] & MAGNITUDE) >> np.uint32(15)] += 1
    above, upper = 0, (1 << 16) - 1
    while above + count[upper] < k:
        above += count[upper]
        upper -= 1
    count[: 1 << 15] = 0
    for i in range(bits.size):
        if (bits[i] & MAGNITUDE) >> np.uint32(15) == upper:
            count[bits[i] & np.uint32(0x7FFF)] += 1
    lower = (1 << 15) - 1
    while above + count[lower] < k:
        above += count[lower]
        lower -= 1
    return np.uint32((upper << 15) | lower), above


@compiled
def _guess(bits, k):
    """A magnitude that, by a sample, slightly more than k elements reach; 0: too few to sample."""
    stride = bits.size // 131_071
    if stride < 2:
        return np.uint32(0)
    sample = np.empty((bits.size - 1) // stride + 1, np.uint32)
    for i in range(sample.size):
        sample[i] = bits[i * stride]
    expected = k / bits.size * sample.size
    rank = int(expected + 4 * np.sqrt(expected)) + 8
    return _kth(sample, rank)[0] if rank < sample.size else np.uint32(0)


@compiled
def top(x, k, index):
    """Fill `index` with where the k largest magnitudes are, in order; of equal ones, the first.

    0 < k <= x.size.
    """
    bits = x.view(np.uint32)
    low = _guess(bits, k)
    room = k + k // 2 + 1024 if low > 0 else 0
    candidates, magnitude = np.empty(room, np.int32), np.empty(room, np.uint32)
    found = _at_least(bits, low, candidates, magnitude) if low > 0 else 0
    n = 0
    if k <= found <= room:
        kth, above = _kth(magnitude[:found], k)
        equal = k - above
        for i in range(found):
            if magnitude[i] > kth or (magnitude[i] == kth and equal > 0):
                equal -= magnitude[i] == kth
                index[n] = candidates[i]
                n += 1
        return
    # few elements, an unlucky sample, or many equal values
    kth, above = _kth(bits, k)
    equal = k - above
    for i in range(bits.size):
        m = np.uint32(bits[i] & MAGNITUDE)
        if m > kth or (m == kth and equal > 0):
            equal -= m == kth
            index[n] = i
            n += 1


@compiled
def take(x, index, values):
    """Move the values at `index` out of `x`; returns whether all of them are finite."""
    finite = True
    for i in range(index.size):
        values[i] = x[index[i]]
        x[index[i]] = ZERO
        finite &= np.isfinite(values[i])
    return finite


@compiled
def scatter_add(out, index, values):
    for i in range(index.size):
        out[index[i]] += values[i]
