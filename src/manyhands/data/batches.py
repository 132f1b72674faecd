"""This rank's batches, micro-batch by micro-batch, in the order the split lays down, from any position on.

`IndexedBatches` serves everything that can be indexed (tensors, arrays, map-style Datasets); `StreamedBatches` serves
IterableDatasets, of which every rank reads all and keeps its part, so that nothing is lost or doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from manyhands.core import Position
from manyhands.errors import TaskError


@dataclass
class Batch:
    values: Any  # None where count is 0 and none was borrowed
    count: int
    last: bool  # of this rank's share of the step


class Take(Protocol):
    """What `split.data.Take` looks like from here."""

    @property
    def position(self) -> Position: ...
    @property
    def micros(self) -> tuple[range, ...]: ...
    @property
    def after(self) -> Position: ...


class Walk(Protocol):
    """What `split.data.DataSplit` looks like from here."""

    @property
    def samples(self) -> int: ...
    @property
    def global_batch(self) -> int: ...
    def take(self, at: Position) -> Take: ...
    def walk(self, at: Position) -> Iterator[Take]: ...


class Dealer(Protocol):
    """What `data.step_claims.Dealt` looks like from here."""

    position: Position

    def takes(self) -> Iterator[Take]: ...


Order = Callable[[int], Tensor]  # epoch -> indices


# -- what can be indexed --


class TensorSource:
    """Tensors or arrays of equal length, kept where they are used: a batch is one gather per tensor."""

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
        """Forget all other columns of the model's input."""
        name = next(iter(self._columns))
        self._columns[name] = self._columns[name].index_select(1, columns.to(self.device))


class DatasetSource:
    """A map-style Dataset; samples are collated here, or by `loaders` worker processes ahead of time."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        collate: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
    ):
        self.dataset, self.device, self.collate, self.loaders = (
            dataset,
            device,
            collate or default_collate,
            loaders,
        )
        self.samples = len(dataset)
        self._dtype: torch.dtype | None = None
        self._kept: Tensor | None = None  # columns of the model's input; None: all

    def fetch(self, indices: Tensor) -> Any:
        wanted = indices.tolist()
        if hasattr(self.dataset, "__getitems__"):
            rows = self.dataset.__getitems__(wanted)
        else:
            rows = [self.dataset[i] for i in wanted]
        return self.place(self.collate(rows))

    def ahead(self, wanted: Iterator[list[int]]) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=_Once(wanted),
            num_workers=self.loaders,
            collate_fn=self.collate,
            pin_memory=self.device.type == "cuda",
        )
        drawn = torch.get_rng_state()
        batches = iter(loader)
        torch.set_rng_state(
            drawn
        )  # it drew its workers' seed; a resumed run, which starts loaders anew, must not be ahead by that
        for values in batches:
            yield self.place(values)

    def place(self, values: Any) -> Any:
        if self._kept is not None:
            values = (
                values[0].index_select(1, self._kept),
                *values[1:],
            )  # the others never leave the host
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

    def place(self, rows: list[Any]) -> Any:
        return move(self.collate(rows), self.device, self.dtype)

    def cast(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


Source = TensorSource | DatasetSource | StreamSource


def source(data: Any, device: torch.device, what: str, loaders: int | None = None) -> Source:
    """Understand what the user brought."""
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
            f"{what} is a {type(data).__name__}; a tuple of tensors or arrays, a Dataset, an IterableDataset or a DataLoader is needed"
        )
    if found.samples == 0:
        raise TaskError(
            f"{what} is empty: there is nothing to train or test on; give at least one sample"
        )
    return found


# -- a rank's walk through it --


class IndexedBatches:
    """`order(epoch)` lists an epoch's indices; `split` says which offsets of it this rank takes at each step. Where a rank
    without samples must still run the model (`borrow`), it gets one that is not its own; `counts` is False then."""

    def __init__(
        self,
        source: TensorSource | DatasetSource,
        order: Order,
        split: Walk,
        at: Position,
        *,
        borrow: bool = False,
        dealer: Dealer | None = None,
    ):
        self.source, self._position, self.steps_per_epoch = (
            source,
            at,
            -(-split.samples // split.global_batch),
        )
        self.samples: int | None = split.samples
        self._order, self._borrow, self.counts = order, borrow, True
        self._epoch, self._indices = -1, torch.empty(0, dtype=torch.long)
        self._split, self._dealer = split, dealer
        self._takes = split.walk(at) if dealer is None else dealer.takes()
        self._take: Take | None = None
        self._micro = 0
        known = (
            isinstance(source, DatasetSource) and source.loaders and dealer is None
        )  # what is drawn cannot be fetched ahead
        self._ahead = (
            cast(DatasetSource, source).ahead(_wanted(split.walk(at), order)) if known else None
        )

    @property
    def position(self) -> Position:
        return self._position if self._dealer is None else self._dealer.position

    @property
    def total(self) -> int:
        """Samples of the step under way, over all ranks that share it."""
        at = self._position if self._take is None else self._take.position
        return min(self._split.global_batch, self._split.samples - at.offset)

    @property
    def own(self) -> int:
        """Those of this rank."""
        return 0 if self._take is None else sum(map(len, self._take.micros))

    def next(self) -> Batch:
        count, last = self.peek()
        self.counts = count > 0
        if not count:
            if self._borrow:
                return Batch(self._borrowed(), 0, last)
            self.skip()
            return Batch(None, 0, last)
        if self._ahead is not None:
            self.skip()
            return Batch(next(self._ahead), count, last)
        return Batch(self.source.fetch(self.next_indices()), count, last)

    def peek(self) -> tuple[int, bool]:
        """How many samples the next micro-batch has, and whether it is the step's last."""
        if self._take is None or self._micro == len(self._take.micros):
            self._take, self._micro = next(self._takes), 0
        return len(self._take.micros[self._micro]), self._micro + 1 == len(self._take.micros)

    def next_indices(self) -> Tensor:
        self.peek()
        assert self._take is not None
        where = self._take.micros[self._micro]
        indices = self._of(self._take.position.epoch)[where.start : where.stop]
        self.skip()
        return indices

    def _borrowed(self) -> Any:
        assert self._take is not None
        first = self._of(self._take.position.epoch)[:1]
        self.skip()
        return self.source.fetch(first)

    def skip(self) -> None:
        _, last = self.peek()
        assert self._take is not None
        self._micro += 1
        if last:
            self._position = self._take.after

    def close(self) -> None:
        """End the loader processes; what they have fetched ahead is forgotten."""
        self._ahead = None

    def _of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            device = self.source.device if isinstance(self.source, TensorSource) else "cpu"
            self._epoch, self._indices = epoch, self._order(epoch).to(device)
        return self._indices


class StreamedBatches:
    """Every rank reads the whole stream and keeps its part of each global batch."""

    def __init__(
        self,
        source: StreamSource,
        cut: Callable[[int], Take],
        global_batch: int,
        at: Position,
        *,
        borrow: bool = False,
    ):
        self.source, self.position, self.steps_per_epoch = source, at, None
        self.samples: int | None = None
        self.total, self.own = (
            global_batch,
            0,
        )  # samples of the step under way, over all ranks and of this one
        self._cut, self._global_batch, self._borrow, self.counts = cut, global_batch, borrow, True
        self._items: Iterator[Any] | None = None
        self._peek: list[Any] = []
        self._pending: list[Batch] = []

    def next(self) -> Batch:
        if not self._pending:
            self._read()
        batch = self._pending.pop(0)
        self.counts = batch.count > 0
        if batch.last:
            self.position = self._after
        return batch

    def _read(self) -> None:
        at = self.position
        if self._items is None:
            self._items = self.source.items(at.epoch)
            for _ in range(at.offset):
                next(self._items, None)
            self._peek = self._pull(1)
            if not self._peek:
                raise TaskError(
                    f"the training stream gave no sample in epoch {at.epoch}; an IterableDataset must give at least one per epoch"
                )
        rows = self._peek + self._pull(self._global_batch - 1)
        self._peek = self._pull(
            1
        )  # one ahead: the last batch of an epoch must know that it is the last
        self._after = Position(at.epoch, at.offset + len(rows), at.steps + 1)
        if not self._peek:
            self._items, self._after = None, Position(at.epoch + 1, 0, at.steps + 1)
            self.samples = at.offset + len(rows)
        micros = self._cut(len(rows)).micros
        self.total, self.own = len(rows), sum(map(len, micros))
        for i, where in enumerate(micros):
            mine = rows[where.start : where.stop]
            values = self.source.place(mine or rows[:1]) if mine or self._borrow else None
            self._pending.append(Batch(values, len(mine), i == len(micros) - 1))

    def close(self) -> None: ...

    def _pull(self, n: int) -> list[Any]:
        assert self._items is not None
        return [row for _, row in zip(range(n), self._items, strict=False)]


class BatchIterator(Protocol):
    """A rank's walk, as everybody else sees it."""

    @property
    def steps_per_epoch(self) -> int | None: ...
    @property
    def source(self) -> Source: ...
    @property
    def position(
        self,
    ) -> Position: ...  # after what was handed out; at one's own pace: of the last meeting
    @property
    def samples(self) -> int | None: ...  # of an epoch; None: nobody knows yet
    @property
    def total(self) -> int: ...
    @property
    def own(self) -> int: ...
    @property
    def counts(self) -> bool: ...
    def next(self) -> Batch: ...
    def close(self) -> None: ...


# -- small things --


def _features(x: Any) -> int:
    if not isinstance(x, Tensor) or x.ndim != 2:
        given = (
            f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        )
        raise TaskError(
            f"split=by_feature needs inputs (samples, columns), but the first of each batch {given}; leave split out"
        )
    return x.shape[1]


def move(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
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


def _wanted(takes: Iterator[Take], order: Order) -> Iterator[list[int]]:
    epoch, indices = -1, torch.empty(0)
    for take in (
        takes
    ):  # with the order of its own epoch: loader processes run ahead, over the end of an epoch too
        if take.position.epoch != epoch:
            epoch, indices = take.position.epoch, order(take.position.epoch)
        for where in take.micros:
            if len(where):
                yield indices[where.start : where.stop].tolist()


class _Once:
    """A batch sampler that DataLoader walks once, without a length."""

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
