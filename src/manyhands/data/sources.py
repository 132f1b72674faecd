"""Data sources: the user's training or test data, read by index or as a stream.

    tensors, arrays              TensorSource     on the device; a batch is one gather per tensor
    map-style Dataset            DatasetSource    samples are collated here or in loader processes
    IterableDataset, iterable    StreamSource     no length, no index, no shuffling

`source` chooses the class. Every source moves its batches to the rank's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from manyhands.errors import TaskError


class TensorSource:
    """Tensors or arrays of equal length, kept on the device: a batch is one gather per tensor."""

    def __init__(self, values: Any, device: torch.device):
        self._mapping = isinstance(values, Mapping)
        names = list(values) if self._mapping else range(len(values))
        self._columns = {n: _tensor(values[n]) for n in names}
        lengths = {n: len(c) for n, c in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise TaskError(f"tensors of one data set must have equal lengths, got {lengths}")
        self.samples = next(iter(lengths.values()), 0)
        self._columns = {n: c.to(device) for n, c in self._columns.items()}
        self.device = device

    def fetch(self, indices: Tensor) -> Any:
        got = {n: c.index_select(0, indices) for n, c in self._columns.items()}
        return got if self._mapping else tuple(got.values())

    def cast(self, dtype: torch.dtype) -> None:
        self._columns = {
            n: c.to(dtype) if c.is_floating_point() else c for n, c in self._columns.items()
        }

    @property
    def features(self) -> int:
        """Columns of the model's input."""
        return _features(next(iter(self._columns.values())))

    def keep_features(self, columns: Tensor) -> None:
        """Drop all other columns of the model's input."""
        name = next(iter(self._columns))
        self._columns[name] = self._columns[name].index_select(1, columns.to(self.device))


class DatasetSource:
    """A map-style Dataset. Samples are collated in this process, or early by `loaders`
    processes."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        collate: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
    ):
        self.dataset, self.device, self.loaders = dataset, device, loaders
        self.collate = collate or default_collate
        self.samples = len(dataset)
        self._dtype: torch.dtype | None = None
        self._kept: Tensor | None = None  # columns of the model's input; None: all

    def fetch(self, indices: Tensor) -> Any:
        wanted = indices.tolist()
        if hasattr(self.dataset, "__getitems__"):
            rows = self.dataset.__getitems__(wanted)
        else:
            rows = [self.dataset[i] for i in wanted]
        return self.to_device(self.collate(rows))

    def prefetch(self, wanted: Iterator[list[int]]) -> Iterator[Any]:
        """Batches of the `wanted` indices, which loader processes fetch early."""
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=_EndlessSampler(wanted),
            num_workers=self.loaders,
            collate_fn=self.collate,
            pin_memory=self.device.type == "cuda",
        )
        # iter() draws a seed for the loader processes; a resumed run starts its loaders anew and
        # must continue with the same random numbers
        before = torch.get_rng_state()
        batches = iter(loader)
        torch.set_rng_state(before)
        for values in batches:
            yield self.to_device(values)

    def to_device(self, values: Any) -> Any:
        if self._kept is not None:
            # the other columns never leave the host
            values = (values[0].index_select(1, self._kept), *values[1:])
        return move(values, self.device, self._dtype)

    def cast(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @property
    def features(self) -> int:
        values = self.collate([self.dataset[0]])
        return _features(values[0] if isinstance(values, tuple | list) else values)

    def keep_features(self, columns: Tensor) -> None:
        self._kept = columns


@dataclass
class StreamSource:
    """An IterableDataset: no length, no index, no shuffling."""

    dataset: Any
    device: torch.device
    collate: Callable[[list[Any]], Any] = default_collate
    samples: int | None = None
    dtype: torch.dtype | None = None

    def items(self, epoch: int) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return iter(self.dataset)

    def to_device(self, rows: list[Any]) -> Any:
        return move(self.collate(rows), self.device, self.dtype)

    def cast(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


Source = TensorSource | DatasetSource | StreamSource


def source(data: Any, device: torch.device, what: str, loaders: int | None = None) -> Source:
    """Choose the source class for `data`; `what` names the data in error messages."""
    collate = None
    if isinstance(data, DataLoader):
        collate, loaders = data.collate_fn, data.num_workers if loaders is None else loaders
        data = data.dataset
    if isinstance(data, torch.utils.data.TensorDataset):
        data = data.tensors
    found: Source
    if isinstance(data, IterableDataset):
        found = StreamSource(data, device, collate or default_collate)
    elif isinstance(data, Tensor | np.ndarray):
        found = TensorSource((data,), device)
    elif (
        isinstance(data, tuple | list | Mapping)
        and len(data)
        and all(isinstance(v, Tensor | np.ndarray) for v in _values(data))
    ):
        found = TensorSource(data, device)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        found = DatasetSource(data, device, collate, loaders or 0)
    elif hasattr(data, "__iter__"):
        found = StreamSource(data, device, collate or default_collate)
    else:
        raise TaskError(
            f"{what} is a {type(data).__name__}; a tuple of tensors or arrays, a Dataset, "
            "an IterableDataset or a DataLoader is needed"
        )
    if found.samples == 0:
        raise TaskError(
            f"{what} is empty: there is nothing to train or test on; give at least one sample"
        )
    return found


def move(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """All tensors in `values` on `device`, those of floating point as `dtype`."""
    if isinstance(values, Tensor):
        values = values.to(device, non_blocking=True)
        return values.to(dtype) if dtype is not None and values.is_floating_point() else values
    if isinstance(values, Mapping):
        return {k: move(v, device, dtype) for k, v in values.items()}
    if isinstance(values, tuple | list):
        return (
            type(values)(*(move(v, device, dtype) for v in values))
            if hasattr(values, "_fields")
            else tuple(move(v, device, dtype) for v in values)
        )
    return values


def _features(x: Any) -> int:
    if not isinstance(x, Tensor) or x.ndim != 2:
        given = (
            f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        )
        raise TaskError(
            "split=by_feature needs inputs (samples, columns), but the first of each batch "
            f"{given}; leave split out"
        )
    return x.shape[1]


class _EndlessSampler:
    """A batch sampler without a length, which DataLoader iterates over once."""

    def __init__(self, wanted: Iterator[list[int]]):
        self._wanted = wanted

    def __iter__(self) -> Iterator[list[int]]:
        return self._wanted


def _tensor(column: Any) -> Tensor:
    tensor = torch.as_tensor(column)
    if tensor.ndim == 0:
        raise TaskError(
            "a data column is a single number; a tensor with one row per sample is needed"
        )
    return (
        tensor.float() if column.dtype == np.float64 and isinstance(column, np.ndarray) else tensor
    )


def _values(data: Any) -> Sequence[Any]:
    return list(data.values()) if isinstance(data, Mapping) else data
