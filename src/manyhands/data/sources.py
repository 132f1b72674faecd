"""Data sources: the user's training or test data, read by index or as a stream.

    tensors, arrays              TensorSource     on the device; a batch is one gather per tensor
    map-style Dataset            DatasetSource    samples are collated here or in loader processes
    IterableDataset, iterable    StreamSource     no length, no index, no shuffling
    none: drawn by the script    DrawnSource      (`data.drawn`)

`source` chooses the class. Every source moves its batches to the rank's device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from manyhands.data.drawn import DrawnSource
from manyhands.data.sampling import Sampling, sampling_of
from manyhands.errors import TaskError

# torch has few operations for these
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


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
        self.device, self.sampling = device, Sampling()

    def digest(self) -> str:
        """Sums over the bits of all columns: equal where two ranks have the same data."""
        sums = []
        for column in self._columns.values():
            flat = column.detach().contiguous().reshape(-1)
            bits = flat.view(_BITS.get(flat.element_size(), torch.uint8))
            sums += [int(bits[i::3].sum(dtype=torch.int64)) for i in range(3)]
        return f"{[tuple(c.shape) for c in self._columns.values()]} {sums}"

    def first(self, most: int) -> Tensor:
        """The indices of the first samples, at most so many."""
        return torch.arange(min(most, self.samples), device=self.device)

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
        workers: Mapping[str, Any] | None = None,
    ):
        self.dataset, self.device, self.loaders = dataset, device, loaders
        self.sampling = Sampling()
        self._workers = workers or {}  # further arguments of the user's DataLoader
        self.collate = collate or default_collate
        self.samples = len(dataset)
        self._dtype: torch.dtype | None = None
        self._kept: Tensor | None = None  # columns of the model's input; None: all

    def digest(self) -> str:
        return str(self.samples)  # samples may be augmented: no two ranks read the same ones

    def first(self, most: int) -> Tensor:
        return torch.arange(min(most, self.samples))

    def fetch(self, indices: Tensor) -> Any:
        wanted = indices.tolist()
        if hasattr(self.dataset, "__getitems__"):
            rows = self.dataset.__getitems__(wanted)
        else:
            rows = [self.dataset[i] for i in wanted]
        return self.to_device(self.collate(rows))

    def prefetch(
        self, wanted: Iterator[list[int]], loaders: int | None = None
    ) -> Generator[Any, None, None]:
        """Batches of the `wanted` indices, which loader processes fetch early."""
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=_EndlessSampler(wanted),
            num_workers=loaders or self.loaders,
            collate_fn=self.collate,
            pin_memory=self.device.type == "cuda",
            **self._workers,
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
    sampling: Sampling = field(default_factory=Sampling)
    loaders: int = 0  # worker processes of the user's DataLoader, which are not used

    def items(self, epoch: int) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return iter(self.dataset)

    def digest(self) -> str:
        return ""  # not known before it is read

    def to_device(self, rows: list[Any]) -> Any:
        return move(self.collate(rows), self.device, self.dtype)

    def cast(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


Source = TensorSource | DatasetSource | StreamSource | DrawnSource


def source(data: Any, device: torch.device, what: str, loaders: int | None = None) -> Source:
    """Choose the source class for `data`; `what` names the data in error messages."""
    collate, sampling, workers, listed = None, Sampling(), {}, False
    if isinstance(data, DataLoader):
        collate, loaders = data.collate_fn, data.num_workers if loaders is None else loaders
        sampling, workers = sampling_of(data, what), _worker_options(data) if loaders else {}
        data, listed = data.dataset, True
    # a subclass may have a __getitem__ of its own (augmentation)
    if type(data) is TensorDataset and collate in (None, default_collate):
        data = data.tensors
    if not listed:
        data = _columns(data, what)
    found: Source
    if isinstance(data, IterableDataset):
        found = StreamSource(data, device, collate or default_collate, loaders=loaders or 0)
    elif isinstance(data, Tensor | np.ndarray):
        found = TensorSource((data,), device)
    elif (
        isinstance(data, tuple | list | Mapping)
        and not (listed and isinstance(data, list))  # a DataLoader takes a list for samples
        and len(data)
        and all(isinstance(v, Tensor | np.ndarray) for v in _values(data))
    ):
        found = TensorSource(data, device)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        found = DatasetSource(data, device, collate, loaders or 0, workers)
    elif hasattr(data, "__iter__"):
        found = StreamSource(data, device, collate or default_collate)
    else:
        raise TaskError(
            f"{what} is a {type(data).__name__}; a tuple of tensors or arrays, a Dataset, "
            "an IterableDataset or a DataLoader is needed"
        )
    found.sampling = sampling
    if found.samples == 0:
        raise TaskError(
            f"{what} is empty: there is nothing to train or test on; give at least one sample"
        )
    return found


def _columns(data: Any, what: str) -> Any:
    """Data frames as arrays; what looks like columns and is none is refused."""
    if isinstance(data, str | bytes | os.PathLike):
        raise TaskError(f"{what} is a path or text ({data!r:.60}); load it, and give tensors")
    if hasattr(data, "to_numpy"):
        return data.to_numpy()
    if hasattr(data, "toarray"):
        raise TaskError(f"{what} is a sparse matrix; give a dense array, x.toarray()")
    if isinstance(data, tuple | list | Mapping) and len(data):
        _refuse_several(data, what)
        _refuse_lists(data, what)
        values = [v.to_numpy() if hasattr(v, "to_numpy") else v for v in _values(data)]
        tensors = [isinstance(v, Tensor | np.ndarray) for v in values]
        if isinstance(data, list) and all(tensors) and len(data) > 4:
            raise TaskError(
                f"{what} is a list of {len(data)} tensors, which may be columns or samples; give a "
                "tuple of columns, or a Dataset of samples"
            )
        if not all(tensors) and (any(tensors) or not isinstance(data, list)):
            kinds = sorted({type(v).__name__ for v in values})
            raise TaskError(
                f"{what} is a {type(data).__name__} of {', '.join(kinds)}; tensors or arrays are "
                "needed as columns (torch.tensor(x) of a list), or a Dataset"
            )
        if all(tensors):
            return (
                dict(zip(data, values, strict=True)) if isinstance(data, Mapping) else tuple(values)
            )
    return data


def _refuse_several(data: Any, what: str) -> None:
    """Refuse data sets, or what may be batches, in the place of samples."""
    values = _values(data)
    if sets := sum(isinstance(v, Dataset | DataLoader) for v in values):
        raise TaskError(
            f"{what} is a {type(data).__name__} with {sets} data sets, but one is needed; join "
            "them by torch.utils.data.ConcatDataset, or evaluate the others after training, with "
            "mh.load"
        )
    rows = {}
    for value in values if isinstance(data, list) else ():
        if (n := _common_rows(value)) is None:
            return
        rows[n] = True
    if max(rows, default=1) > 1:
        raise TaskError(
            f"{what} is a list of {len(data)} {type(values[0]).__name__}s of tensors with the same "
            f"number of rows ({', '.join(map(str, list(rows)[:3]))}), which may be samples, "
            "batches or whole data sets; give one Dataset of single samples: a TensorDataset of "
            "all rows, or a class with __getitem__"
        )


def _refuse_lists(data: Any, what: str) -> None:
    """Refuse Python lists of numbers within a list: they are no tensors, and collating samples that
    hold them would make a column of each place."""
    if not isinstance(data, list):
        return
    first = data[0]
    if _is_numbers(first):
        raise TaskError(
            f"{what} is a list of lists of numbers, which may be columns or samples; give a tuple "
            "of tensors: (torch.tensor(x), torch.tensor(y))"
        )
    if isinstance(first, tuple | Mapping) and any(map(_is_numbers, _values(first))):
        raise TaskError(
            f"a sample of {what} holds a list of numbers, which is no tensor; give "
            "torch.tensor([...]) in its place, or all samples as a tuple of tensors"
        )


def _is_numbers(value: Any) -> bool:
    """Whether it is a Python list of numbers, or of such lists."""
    while isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, int | float):
            return True
    return False


def _common_rows(value: Any) -> int | None:
    """The first dimension of all tensors in an element of a list; None: there is none."""
    if not isinstance(value, tuple | list | Mapping) or len(value) < 2:
        return None
    rows = set()
    for column in _values(value):
        if not isinstance(column, Tensor | np.ndarray) or not column.ndim:
            return None
        rows.add(len(column))
    return rows.pop() if len(rows) == 1 else None


def _worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Arguments of a DataLoader about its worker processes."""
    names = ("worker_init_fn", "timeout", "prefetch_factor", "multiprocessing_context")
    found = {name: getattr(loader, name, None) for name in names}
    return {name: value for name, value in found.items() if value}


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
    if isinstance(column, np.ndarray) and column.dtype.kind not in "biufc":
        raise TaskError(f"a data column is an array of {column.dtype}; numbers are needed")
    if isinstance(column, np.ndarray) and any(stride < 0 for stride in column.strides):
        column = np.ascontiguousarray(column)  # torch has no negative strides
    tensor = torch.as_tensor(column)
    if tensor.dtype == torch.uint64:
        raise TaskError(
            "a data column is of uint64, which torch does not compute with; give int64 or float32"
        )
    tensor = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
    if tensor.ndim == 0:
        raise TaskError(
            "a data column is a single number; a tensor with one row per sample is needed"
        )
    return (
        tensor.float() if column.dtype == np.float64 and isinstance(column, np.ndarray) else tensor
    )


def _values(data: Any) -> Sequence[Any]:
    return list(data.values()) if isinstance(data, Mapping) else data
