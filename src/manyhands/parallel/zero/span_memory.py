"""Span memory: the vectors in which spans keep their values and gradients on this rank.

    values       all of them stay here (stages 1 and 2), or only this rank's slices (stage 3)
    gradients    all of them (stage 1), or only this rank's slices (stages 2 and 3)

A span's `value` and `grad` are this rank's slices in either case; where all values or gradients are
here, they are views.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from manyhands.core import Group, Tensors
from manyhands.parallel.zero.spans import Span, SpanEntry
from manyhands.replica.deferred.unmade import place, value_of
from manyhands.replica.parameters import Allocate, ParameterView


def dtype_key(span: Span) -> str:
    return str(span.dtype).removeprefix("torch.")


def allocate_slices(
    spans: list[Span], what: Literal["value", "grad"], device: torch.device, merged: bool
) -> Tensors:
    """One vector a dtype for this rank's slices of all spans. Returns that vector (`merged`), or
    the slice of each span."""
    found: Tensors = {}
    for dtype in dict.fromkeys(s.dtype for s in spans):
        some, first = [s for s in spans if s.dtype == dtype], 0
        lengths = [s.own.stop - s.own.start for s in some]
        vector = torch.zeros(sum(lengths), dtype=dtype, device=device)
        if merged:
            found[dtype_key(some[0])] = vector
        for s, length in zip(some, lengths, strict=True):
            own = vector[first : first + length]
            if what == "value":
                s.value = own
            else:
                s.grad = own
            if not merged:
                found[s.key] = own
            first += length
    return found


def allocate_values(
    spans: list[Span], allocate: Allocate, group: Group, common: bool
) -> tuple[Tensors, int]:
    """All values of all spans, into which parameters are copied and of which they become views.
    `common`: the memory is shared by all ranks, and each value is written by one of them. Returns
    this rank's slices, and the bytes that are common."""
    values: Tensors = {}
    common_bytes = 0
    for vector, each in _whole_vectors(spans, allocate):
        common_bytes += vector.nbytes if common else 0
        for s, full in each:
            for entry in s.entries:
                # all ranks have the same values, and making them takes time where they are unmade
                if not common or group.rank == entry.index % group.size:
                    s.view(full, entry).copy_(value_of(entry.parameter))
                place(entry.parameter, s.view(full, entry))
            s.full, s.value = full, full[s.own]
            values[s.key] = s.value
        if common:
            group.all_gather({"start": vector}).wait()  # no rank reads before rank 0 has written
    return values, common_bytes


def keep_slice(span: Span, entry: SpanEntry) -> None:
    """Copy this rank's slice of a parameter into the span's `value`. Padding stays zero."""
    start, stop = span.owned(entry)
    if start < stop:
        whole = value_of(entry.parameter).reshape(-1)
        span.value[span.own_slice(entry)].copy_(whole[start:stop])


def allocate_gradients(spans: list[Span], allocate: Allocate) -> Tensors:
    """Buffers for all gradients of all spans; returns this rank's slices."""
    grads: Tensors = {}
    for _, each in _whole_vectors(spans, allocate):
        for s, buffer in each:
            s.buffer, s.grad = buffer, buffer[s.own]
            grads[s.key] = s.grad
    return grads


def parameter_views(spans: list[Span], merged: bool) -> list[ParameterView]:
    """This rank's slice of every parameter, as the optimizer and merge strategies know it."""
    found: dict[int, ParameterView] = {}
    ends: dict[str, int] = {}
    for s in spans:
        key = dtype_key(s) if merged else s.key
        first = ends.get(key, 0) if merged else 0  # of the span in its vector
        ends[key] = first + s.own.stop - s.own.start
        for entry in s.entries:
            own = s.own_slice(entry)
            value, grad = s.value[own], s.grad[own]
            found[entry.index] = ParameterView(
                entry.name, nn.Parameter(value), value, grad, key, first + own.start
            )
    return [found[i] for i in range(len(found))]


def _whole_vectors(
    spans: list[Span], allocate: Allocate
) -> Iterator[tuple[Tensor, list[tuple[Span, Tensor]]]]:
    """A vector a dtype, and each span's range in it."""
    for dtype in dict.fromkeys(s.dtype for s in spans):
        some = [s for s in spans if s.dtype == dtype]
        lengths = [s.length for s in some]
        vector = allocate(sum(lengths), dtype)
        yield vector, list(zip(some, vector.split(lengths), strict=True))
