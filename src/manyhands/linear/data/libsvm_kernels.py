"""Kernels of the libsvm format: text to CSR arrays, and CSR arrays to text.

    line:    label [index:value ...] [# comment]        fields are separated by blanks
    number:  [+-] digits [. digits] [e [+-] digits]     also .5 and 5.

A decimal number m * 10^e is exact in float64 when m <= 2^53 and |e| <= 22: both are floats without
error, and one multiplication or division rounds once, hence correctly (Clinger 1990). Any other
number is copied aside as text, and the caller has it converted by a correct, slower routine.

Text given to these kernels ends with a line end, so no loop over a token asks for the text's end.
"""

from __future__ import annotations

import numpy as np

from manyhands.kernels.compile import U64, compiled, inlined

NEWLINE, BLANK, HASH, PLUS, MINUS, POINT, COLON = 10, 32, 35, 43, 45, 46, 58
ZERO, LOWER_E, UPPER_E = 48, 101, 69
EXACT, ODD, MALFORMED = 0, 1, 2
SOUND, BAD_LABEL, BAD_FIELD, BAD_INDEX, OUT_OF_ORDER, BEYOND = range(6)

POWERS = 10.0 ** np.arange(23)
LARGEST_EXACT = U64(2**53)
LONGEST_MANTISSA = 19  # digits that always fit into 64 bits
LARGEST_EXPONENT = 100_000  # beyond it a float64 is 0 or infinite whatever the other digits are
INDEX_DIGITS = 12


@inlined
def _blank(c):
    return c == 32 or (9 <= c <= 13 and c != 10)


@inlined
def _token_ends(c):
    return c == 32 or 9 <= c <= 13 or c == 35


@inlined
def _number(text, at):
    """(value, place after it, EXACT | ODD | MALFORMED)."""
    negative = text[at] == MINUS
    if negative or text[at] == PLUS:
        at += 1
    mantissa, first = U64(0), at
    digit = np.uint8(text[at] - ZERO)
    while digit < 10:
        mantissa = mantissa * U64(10) + U64(digit)
        at += 1
        digit = np.uint8(text[at] - ZERO)
    digits, exponent = at - first, np.int64(0)
    if text[at] == POINT:
        at += 1
        first = at
        digit = np.uint8(text[at] - ZERO)
        while digit < 10:
            mantissa = mantissa * U64(10) + U64(digit)
            at += 1
            digit = np.uint8(text[at] - ZERO)
        exponent = np.int64(first - at)
        digits -= exponent
    if digits == 0:
        return 0.0, at, MALFORMED
    if text[at] == LOWER_E or text[at] == UPPER_E:
        at += 1
        down = text[at] == MINUS
        if down or text[at] == PLUS:
            at += 1
        first, power = at, np.int64(0)
        digit = np.uint8(text[at] - ZERO)
        while digit < 10:
            power = power * 10 + np.int64(digit) if power < LARGEST_EXPONENT else power
            at += 1
            digit = np.uint8(text[at] - ZERO)
        if at == first:
            return 0.0, at, MALFORMED
        exponent += -power if down else power
    if not _token_ends(text[at]):
        return 0.0, at, MALFORMED
    if digits > LONGEST_MANTISSA or mantissa > LARGEST_EXACT or not -22 <= exponent <= 22:
        return 0.0, at, ODD
    value = np.float64(mantissa)
    value = value / POWERS[-exponent] if exponent < 0 else value * POWERS[exponent]
    return (-value if negative else value), at, EXACT


@inlined
def _index(text, at):
    """(index, place after it); the place is where it began when no index stands there."""
    begin, negative = at, text[at] == MINUS
    if negative or text[at] == PLUS:
        at += 1
    first, index = at, np.int64(0)
    digit = np.uint8(text[at] - ZERO)
    while digit < 10:
        if at - first < INDEX_DIGITS + 1:
            index = index * 10 + np.int64(digit)
        at += 1
        digit = np.uint8(text[at] - ZERO)
    if at == first:
        return np.int64(0), begin
    return (-index if negative else index), at


@compiled
def count(text, end):
    """(line ends, colons) in text[:end]: bounds of rows and non-zeros."""
    lines = colons = 0
    for i in range(U64(end)):
        lines += text[i] == NEWLINE
        colons += text[i] == COLON
    return lines, colons


@compiled
def has_index_zero(text, end):
    """Whether some row's first index is 0, which only a zero-based file has."""
    at = 0
    while at < end:
        while _blank(text[at]):
            at += 1
        while not _token_ends(text[at]):  # the label
            at += 1
        while _blank(text[at]):
            at += 1
        index, after = _index(text, at)
        if index == 0 and after > at and text[after] == COLON:
            return True
        while text[at] != NEWLINE:
            at += 1
        at += 1
    return False


@inlined
def _set_aside(text, first, last, slot, odd, places):
    """Copies a number that is not exact to `odd`: its text, its slot and where it stands.

    places: bytes of text and numbers in `odd` so far.
    """
    to = places[0]
    for i in range(first, last):
        odd[0][to] = text[i]
        to += 1
    odd[0][to] = BLANK
    odd[1][places[1]] = slot
    odd[2][places[1]] = first
    places[0] = to + 1
    places[1] += 1


@compiled
def parse(text, end, base, limit, arrays, odd, places):
    """(rows, non-zeros, fault, place of the faulty field); arrays: labels, indptr, indices, values.

    A number that is not exact gets its slot: its place among the values, or -1 - row for a label.
    """
    labels, indptr, indices, values = arrays
    at, rows, nonzeros = 0, 0, 0
    indptr[0] = 0
    while at < end:
        while _blank(text[at]):
            at += 1
        if text[at] != NEWLINE and text[at] != HASH:
            value, after, kind = _number(text, at)
            if kind == MALFORMED:
                return rows, nonzeros, BAD_LABEL, at
            if kind == ODD:
                _set_aside(text, at, after, -1 - rows, odd, places)
            labels[rows] = value
            at, before = after, np.int64(-1)
            while True:
                while _blank(text[at]):
                    at += 1
                if text[at] == NEWLINE or text[at] == HASH:
                    break
                index, after = _index(text, at)
                if after == at or text[after] != COLON:
                    return rows, nonzeros, BAD_FIELD, at
                value, stop, kind = _number(text, after + 1)
                if kind == MALFORMED:
                    return rows, nonzeros, BAD_FIELD, at
                index -= base
                if index < 0:
                    return rows, nonzeros, BAD_INDEX, at
                if index <= before:
                    return rows, nonzeros, OUT_OF_ORDER, at
                if index >= limit:
                    return rows, nonzeros, BEYOND, at
                if kind == ODD:
                    _set_aside(text, after + 1, stop, nonzeros, odd, places)
                indices[nonzeros] = index
                values[nonzeros] = value
                nonzeros += 1
                at, before = stop, index
            rows += 1
            indptr[rows] = nonzeros
        while text[at] != NEWLINE:  # a comment
            at += 1
        at += 1
    return rows, nonzeros, SOUND, 0
