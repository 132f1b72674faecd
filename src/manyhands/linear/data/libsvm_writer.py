"""libsvm writer: row blocks to text, with a chosen number of significant digits.

    0 < |x|:   m = round(|x| 10^(digits - 1 - e)),  e = floor(log10 |x|);   x is written as m 10^...

Rounding to `digits` loses the rest: a file for other programs, not a copy to compute on. Row shards
keep every bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from manyhands.kernels.compile import U64, compiled, inlined
from manyhands.linear.data.blocks import RowBlock

BLANK, NEWLINE, PLUS, MINUS, POINT, COLON, ZERO, E = 32, 10, 43, 45, 46, 58, 48, 101
LOWEST_FIXED = -5  # decimal exponent from which a number is written without e
MOST_DIGITS = 15
POWERS = 10.0 ** np.arange(309)
ROWS_AT_A_TIME = 1 << 16


@inlined
def _put_integer(out, to, number):
    """Decimal digits of `number`; the place after them."""
    digits, rest = 1, number
    while rest >= U64(10):
        rest //= U64(10)
        digits += 1
    for place in range(to + digits - 1, to - 1, -1):
        out[place] = ZERO + number % U64(10)
        number //= U64(10)
    return to + digits


@inlined
def _scaled(x, power):
    """x * 10^power, also where 10^power alone is no float64."""
    while power > 300:
        x, power = x * 1e300, power - 300
    while power < -300:
        x, power = x / 1e300, power + 300
    return x * POWERS[power] if power >= 0 else x / POWERS[-power]


@inlined
def _put_number(out, to, x, digits):
    if x < 0:
        out[to] = MINUS
        to += 1
        x = -x
    if x == 0:
        out[to] = ZERO
        return to + 1
    e = int(np.floor(np.log10(x)))
    m = U64(np.rint(_scaled(x, digits - 1 - e)))
    if m >= U64(POWERS[digits]):  # 9.9999996 rounds up to one digit more
        m, e = m // U64(10), e + 1
    shown = digits
    while shown > 1 and m % U64(10) == U64(0):
        m //= U64(10)
        shown -= 1
    fixed = LOWEST_FIXED <= e < digits
    if fixed and e < 0:  # 0.00123
        out[to] = ZERO
        out[to + 1] = POINT
        for place in range(to + 2, to + 1 - e):
            out[place] = ZERO
        return _put_integer(out, to + 1 - e, m)
    whole = e + 1 if fixed else 1  # digits before the point
    while shown < whole:
        m *= U64(10)
        shown += 1
    to = _put_integer(out, to, m)
    if shown > whole:
        for place in range(to, to - shown + whole, -1):
            out[place] = out[place - 1]
        out[to - shown + whole] = POINT
        to += 1
    if not fixed:
        out[to] = E
        out[to + 1] = MINUS if e < 0 else PLUS
        to = _put_integer(out, to + 2, U64(abs(e)))
    return to


@compiled
def _write(first, last, indptr, indices, values, labels, base, digits, out):
    to = 0
    for row in range(first, last):
        to = _put_number(out, to, np.float64(labels[row]), digits)
        for place in range(indptr[row], indptr[row + 1]):
            out[to] = BLANK
            to = _put_integer(out, to + 1, U64(indices[place] + base))
            out[to] = COLON
            to = _put_number(out, to + 1, np.float64(values[place]), digits)
        out[to] = NEWLINE
        to += 1
    return to


def write_libsvm(
    blocks: Iterable[RowBlock],
    path: str | os.PathLike[str],
    digits: int = 6,
    zero_based: bool = False,
) -> int:
    """Writes all rows, labels and values rounded to `digits`; returns the number of rows.

    The file appears under its name when it is complete; until then it is called `path`.partial.
    """
    if not 1 <= digits <= MOST_DIGITS:
        raise ValueError(f"digits={digits} is given; 1 to {MOST_DIGITS} is needed")
    partial = Path(f"{os.fspath(path)}.partial")
    out, rows = np.empty(0, np.uint8), 0
    try:
        with open(partial, "wb", buffering=0) as file:
            for block in blocks:
                if not (np.isfinite(block.values).all() and np.isfinite(block.labels).all()):
                    raise ValueError(
                        f"{path}: the block of rows from {block.start} contains NaN or infinity; "
                        "finite numbers are needed"
                    )
                for first in range(0, block.rows, ROWS_AT_A_TIME):
                    last = min(block.rows, first + ROWS_AT_A_TIME)
                    nonzeros = int(block.indptr[last] - block.indptr[first])
                    room = (last - first) * (digits + 10) + nonzeros * (digits + 22)
                    if len(out) < room:
                        out = np.empty(room, np.uint8)
                    arrays = (block.indptr, block.indices, block.values, block.labels)
                    written = _write(first, last, *arrays, 1 - int(zero_based), digits, out)
                    view = out.data[:written]
                    while view:
                        view = view[file.write(view) :]
                rows += block.rows
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return rows
