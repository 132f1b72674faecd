"""Id columns: which tensors of a batch, or columns of them, hold the ids that a model looks up.

They are learned from one forward pass, so that the rows of later batches can be prefetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.embedding.modules import Embedding


@dataclass
class IdColumn:
    """One tensor of the batch, found by `path`: all of it, or the same columns of every row, given
    by `offset`, `sizes` and `strides`."""

    path: tuple[Any, ...]
    # sizes and strides of the tensor after its first axis; a later batch must have the same
    row: tuple[Any, ...] | None = None
    offset: int = 0
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def of(self, values: Any) -> Tensor | None:
        for key in self.path:
            values = values[key]
        if self.row is None:
            return values
        if (values.shape[1:], values.stride()[1:]) != self.row:
            return None
        start = values.storage_offset() + self.offset
        return values.as_strided(
            (len(values), *self.sizes), (values.stride(0), *self.strides), start
        )


@dataclass
class IdColumns:
    """Id columns of all modules, learned from one batch."""

    known: list[tuple[Embedding, IdColumn]] | None = None
    _values: Any = None
    _seen: list[tuple[Embedding, IdColumn | None]] = field(default_factory=list)
    _noticed: bool = False

    def learn_from(self, values: Any) -> None:
        self.end()
        if self.known is None:
            self._values = values

    def record(self, module: Embedding, ids: Tensor) -> None:
        if self._values is not None:
            self._seen.append((module, _locate(ids, self._values)))

    def end(self) -> None:
        if self._seen:
            self.known = [(m, column) for m, column in self._seen if column is not None]
        self._values = None

    def of(self, values: Any, notice: Callable[[str], None]) -> list[tuple[Embedding, Tensor]]:
        if self.known is None:
            return []
        if not self._noticed:
            self._noticed = True
            if lost := sorted({m.name for m, column in self._seen if column is None}):
                notice(
                    f"the model computes the ids of {', '.join(lost)}, so their rows are not "
                    "prefetched; name them in Task.ids"
                )
        found = [(m, column.of(values)) for m, column in self.known]
        return [(m, ids) for m, ids in found if ids is not None]


def _locate(ids: Tensor, values: Any) -> IdColumn | None:
    for path, tensor in _tensors(values, ()):
        if (
            tensor.dtype != torch.int64
            or tensor.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr()
        ):
            continue
        if tensor.numel() == ids.numel() and same_ids(tensor, ids):
            return IdColumn(path)
        if (
            ids.ndim
            and tensor.ndim
            and ids.shape[0] == tensor.shape[0]
            and ids.stride(0) == tensor.stride(0)
        ):
            row = (tensor.shape[1:], tensor.stride()[1:])
            offset = int(ids.storage_offset()) - int(tensor.storage_offset())
            return IdColumn(path, row, offset, tuple(ids.shape[1:]), ids.stride()[1:])
    return None


def _tensors(values: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(values, Tensor):
        yield path, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _tensors(value, (*path, key))
    elif isinstance(values, tuple | list):
        for i, value in enumerate(values):
            yield from _tensors(value, (*path, i))


def same_ids(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors list the same ids in the same order, whatever their shapes."""
    if a.numel() != b.numel():
        return False
    if a.data_ptr() == b.data_ptr() and (
        (a.is_contiguous() and b.is_contiguous()) or (a.shape, a.stride()) == (b.shape, b.stride())
    ):
        return True
    return a.device == b.device and torch.equal(a.reshape(-1), b.reshape(-1))
