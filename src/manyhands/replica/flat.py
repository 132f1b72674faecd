"""A module's parameters as views into one long vector per dtype, and a twin vector for their gradients.

Merge arithmetic, wire and checkpoint then see few long vectors, while the module and its optimizer keep their own
parameters. Each parameter starts at a multiple of 64 bytes, so kernels load aligned; the padding stays zero.
Gradients are cut into buckets from the back, the order in which backward makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.core import Tensors

Allocate = Callable[[int, torch.dtype], Tensor]
ALIGN_BYTES = 64


@dataclass(frozen=True)
class ParameterView:
    """One parameter's place in the flat vectors."""

    name: str
    parameter: nn.Parameter
    value: Tensor
    grad: Tensor
    vector: str  # which flat vector, by its key
    start: int  # first element there


@dataclass(frozen=True)
class Bucket:
    """A run of neighbouring pieces that travel together."""

    name: str
    pieces: tuple[int, ...]  # indices into FlatParameters.pieces
    grad: Tensor


class FlatParameters:
    """`allocate` says where the vectors live: private memory, a device, or memory shared with other ranks. Values may be
    `allocate_values`d in memory that all ranks have in common; then only one of them `writes` its weights there."""

    def __init__(
        self,
        module: nn.Module,
        allocate: Allocate,
        bucket_bytes: int,
        allocate_values: Allocate | None = None,
        writes: bool = True,
    ):
        self._allocate_values, self._writes = allocate_values or allocate, writes
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.values: Tensors = {}
        self.grads: Tensors = {}
        self.pieces: list[ParameterView] = []
        self.buckets: list[Bucket] = []
        for dtype in dict.fromkeys(p.dtype for _, p in named):
            self._lay_out(
                [(n, p) for n, p in named if p.dtype == dtype], dtype, allocate, bucket_bytes
            )
        # the samples behind the gradient, then for each piece how many ranks used it
        self.count = allocate(1 + len(self.pieces), torch.float32)

    @property
    def used(self) -> Tensor:
        return self.count[1:]

    def _lay_out(
        self,
        named: list[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        allocate: Allocate,
        bucket_bytes: int,
    ) -> None:
        align = max(1, ALIGN_BYTES // dtype.itemsize)
        starts, end = [], 0
        for _, p in named:
            starts.append(end)
            end += -(-p.numel() // align) * align
        key = str(dtype).removeprefix("torch.")
        values, grads = self._allocate_values(end, dtype), allocate(end, dtype)
        self.values[key], self.grads[key] = values, grads
        first = len(self.pieces)
        for (name, p), start in zip(named, starts, strict=True):
            # keep the memory format (channels_last) where the parameter fills its memory without holes
            stride = p.stride() if _dense(p) else torch.empty(p.shape, device="meta").stride()
            value = torch.as_strided(values, p.shape, stride, start)
            if self._writes:
                value.copy_(p.data)
            p.data = value
            self.pieces.append(
                ParameterView(
                    name, p, value, torch.as_strided(grads, p.shape, stride, start), key, start
                )
            )
        self._cut(first, [*starts, end], key, grads, bucket_bytes)

    @contextlib.contextmanager
    def holding(self, values: Tensors | None) -> Iterator[None]:
        """Have other `values` for a while; None: stay as it is."""
        if values is None:
            yield
            return
        own = {k: v.clone() for k, v in self.values.items()}
        try:
            for k, v in values.items():
                self.values[k].copy_(v)
            yield
        finally:
            for k, v in own.items():
                self.values[k].copy_(v)

    def shapes(self) -> dict[str, list[tuple[slice, torch.Size]]]:
        """Which parameters lie where in each vector and in each bucket, by name."""
        whole: dict[str, list[tuple[slice, torch.Size]]] = {k: [] for k in self.values}
        for piece in self.pieces:
            whole[piece.vector].append(
                (slice(piece.start, piece.start + piece.parameter.numel()), piece.parameter.shape)
            )
        for bucket in self.buckets:
            first = self.pieces[bucket.pieces[0]].start
            inside = [self.pieces[i] for i in bucket.pieces]
            whole[bucket.name] = [
                (slice(p.start - first, p.start - first + p.parameter.numel()), p.parameter.shape)
                for p in inside
            ]
        return whole

    def _cut(
        self, first: int, bounds: list[int], key: str, grads: Tensor, bucket_bytes: int
    ) -> None:
        stop = len(bounds) - 1
        for i in reversed(range(len(bounds) - 1)):
            if (bounds[stop] - bounds[i]) * grads.element_size() >= bucket_bytes or i == 0:
                pieces = tuple(range(first + i, first + stop))
                self.buckets.append(
                    Bucket(f"{key}[{len(self.buckets)}]", pieces, grads[bounds[i] : bounds[stop]])
                )
                stop = i


def _dense(p: Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(p.shape, p.stride(), strict=True), key=lambda s: s[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
