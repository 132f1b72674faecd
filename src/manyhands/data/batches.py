"""Batch iterators: this rank's batches, micro-batch by micro-batch, from any position on.

`IndexedBatches` reads sources with an index (tensors, arrays, map-style Datasets).
`StreamedBatches` reads streams: every rank reads the whole stream and keeps its samples of each
global batch, so no sample is lost or used twice. All ranks read with the same random numbers, those
of (seed, epoch), and compare the first global batch of each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.core import Position
from manyhands.data.drawn import DrawnSource
from manyhands.data.row_digest import row_digest
from manyhands.data.sampling import RandomNumbers
from manyhands.data.sources import DatasetSource, Source, StreamSource, TensorSource
from manyhands.data.step_claims import StepClaims
from manyhands.errors import TaskError
from manyhands.split.data import BatchSplit, DataSplit, StepSamples, epoch_seed

EpochOrder = Callable[[int], Tensor]  # epoch -> indices


@dataclass
class Batch:
    """One micro-batch of this rank."""

    values: Any  # None where count is 0 and no sample was borrowed
    count: int
    last: bool  # of this rank's micro-batches of the step


class BatchIterator(Protocol):
    """This rank's batches, and the position after them."""

    @property
    def batches_per_epoch(self) -> int | None:
        """That this rank gets; None: of a stream, which has no length."""
        ...

    @property
    def source(self) -> Source: ...
    @property
    def position(self) -> Position:
        """After the last batch; for a rank that claims its steps, at the last sync point."""
        ...

    @property
    def samples(self) -> int | None:
        """Of an epoch; None: not known yet."""
        ...

    @property
    def total(self) -> int:
        """Samples of the current step, over all ranks that share it."""
        ...

    @property
    def own(self) -> int:
        """Samples of the current step on this rank."""
        ...

    @property
    def counts(self) -> bool:
        """Whether the last batch counts: False where it has no sample or a borrowed one."""
        ...

    @property
    def loading(self) -> bool:
        """Whether `next` is at work now, for a thread that watches this one."""
        ...

    def next(self) -> Batch: ...
    def close(self) -> None: ...


class IndexedBatches:
    """Batches of a source with an index: `order(epoch)` lists the epoch's indices, `split` (or the
    steps that `claims` claims) says which offsets of it this rank computes at each step. With
    `borrow`, a rank without samples, which must still run the model, gets one sample that does not
    count."""

    def __init__(
        self,
        source: TensorSource | DatasetSource | DrawnSource,
        order: EpochOrder,
        split: DataSplit | BatchSplit,
        at: Position,
        *,
        borrow: bool = False,
        claims: StepClaims | None = None,
    ):
        self.source, self._position = source, at
        self.samples: int | None = split.samples
        self._order, self._borrow, self.counts = order, borrow, True
        self._epoch, self._indices = -1, torch.empty(0, dtype=torch.long)
        self.split, self._claims = split, claims
        self._steps = split.steps_from(at) if claims is None else claims.claimed_samples()
        self._step: StepSamples | None = None
        self._micro, self.loading = 0, False
        self.drawn = at.steps  # the number of the first step that was not asked for yet
        self._prefetched: Iterator[Any] | None = None
        # loader processes need to know the steps beforehand: claimed steps cannot be prefetched
        if isinstance(source, DatasetSource) and source.loaders and claims is None:
            self._prefetched = source.prefetch(_wanted(self._early(split.steps_from(at)), order))

    @property
    def position(self) -> Position:
        return self._position if self._claims is None else self._claims.position

    def claim_parts(
        self,
        claim_step: Callable[[int], int | None],
        request_sync: Callable[[], None],
        parts: int,
    ) -> StepClaims:
        """From this position on, claim parts of steps instead of computing one of each."""
        at, split = self.position, self.split
        assert isinstance(split, DataSplit) and self._prefetched is None
        self._claims = StepClaims(split, at, claim_step, request_sync, parts=parts)
        self._steps, self._step = self._claims.claimed_samples(), None
        return self._claims

    def stop_claiming(self) -> None:
        """From this position on, which is a sync point, compute this rank's part of every step."""
        self._position = at = self.position
        self._claims, self._steps, self._step = None, self.split.steps_from(at), None

    @property
    def batches_per_epoch(self) -> int:
        counted = 0
        for step in self.split.steps_from(Position(self._position.epoch)):
            counted += sum(1 for micro in step.micros if len(micro) or self._borrow)
            if step.after.epoch > self._position.epoch:
                return counted
        raise AssertionError("an epoch has an end")

    @property
    def total(self) -> int:
        at = self._position if self._step is None else self._step.position
        return self.split.total(at)

    @property
    def own(self) -> int:
        return 0 if self._step is None else sum(map(len, self._step.micros))

    def next(self) -> Batch:
        self.loading = True
        try:
            return self._next()
        finally:
            self.loading = False

    def _next(self) -> Batch:
        count, last = self.peek()
        self.counts = count > 0
        if not count:
            if self._borrow:
                return Batch(self._borrowed(), 0, last)
            self.skip()
            return Batch(None, 0, last)
        if self._prefetched is not None:
            self.skip()
            return Batch(next(self._prefetched), count, last)
        return Batch(self.source.fetch(self.next_indices()), count, last)

    def peek(self) -> tuple[int, bool]:
        """How many samples the next micro-batch has, and whether it is the step's last."""
        if self._step is None or self._micro == len(self._step.micros):
            self._step, self._micro = next(self._steps), 0
            self.drawn = max(self.drawn, self._step.position.steps + 1)
        return len(self._step.micros[self._micro]), self._micro + 1 == len(self._step.micros)

    def _early(self, steps: Iterator[StepSamples]) -> Iterator[StepSamples]:
        """Steps as loader processes ask for them."""
        for step in steps:
            self.drawn = max(self.drawn, step.position.steps + 1)
            yield step

    def next_indices(self) -> Tensor:
        self.peek()
        assert self._step is not None
        where = self._step.micros[self._micro]
        indices = self._of(self._step.position.epoch)[where.start : where.stop]
        self.skip()
        return indices

    def _borrowed(self) -> Any:
        assert self._step is not None
        first = self._of(self._step.position.epoch)[:1]
        self.skip()
        return self.source.fetch(first)

    @property
    def micros(self) -> int:
        """Micro-batches of the step."""
        self.peek()
        assert self._step is not None
        return len(self._step.micros)

    def micro(self, k: int) -> tuple[Any, int]:
        """The k-th micro-batch of the step, and its number of samples."""
        assert self._step is not None
        where = self._step.micros[k]
        indices = self._of(self._step.position.epoch)[where.start : where.stop]
        return self.source.fetch(indices), len(where)

    def rewind(self) -> None:
        """Give the last step's micro-batches once more; not where they are prefetched."""
        assert self._prefetched is None
        self._micro = 0

    def pass_over(self) -> None:
        """Leave out what is still to come of the step."""
        self.peek()
        assert self._step is not None
        self._micro, self._position = len(self._step.micros), self._step.after

    def skip(self) -> None:
        _, last = self.peek()
        assert self._step is not None
        self._micro += 1
        if last:
            self._position = self._step.after

    def close(self) -> None:
        """End the loader processes and drop what they have prefetched."""
        self._prefetched = None

    def _of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            device = self.source.device if isinstance(self.source, TensorSource) else "cpu"
            self._epoch, self._indices = epoch, self._order(epoch).to(device)
        return self._indices


class StreamedBatches:
    """Batches of a stream, of which every rank reads all: of n rows of a global batch this rank
    keeps `keep(n)`. `agree` says whether the other ranks have read rows of the same digest at a
    position; None: there is no other rank."""

    def __init__(
        self,
        source: StreamSource,
        keep: Callable[[int], StepSamples],
        global_batch: int,
        at: Position,
        *,
        borrow: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        agree: Callable[[Position, str], bool] | None = None,
    ):
        self.source, self.position, self.batches_per_epoch = source, at, None
        # read early: one row says whether this batch is the last of its epoch; whether the next
        # one is complete takes all of its rows
        self._early = global_batch if drop_last else 1
        self.samples: int | None = None
        self.total, self.own = global_batch, 0
        self._keep, self._global_batch, self._borrow, self.counts = keep, global_batch, borrow, True
        self._seed, self._agree, self._random = seed, agree, RandomNumbers(seed)
        self._items: Iterator[Any] | None = None
        self._peek: list[Any] = []
        self._pending: list[Batch] = []
        self.loading = False

    def next(self) -> Batch:
        if not self._pending:
            self.loading = True
            try:
                self._read()
            finally:
                self.loading = False
        batch = self._pending.pop(0)
        self.counts = batch.count > 0
        if batch.last:
            self.position = self._after
        return batch

    def _read(self) -> None:
        at, begins = self.position, self._items is None
        if begins:
            self._random = RandomNumbers(epoch_seed(self._seed, at.epoch))
        with self._random.drawn():
            if begins:
                self._begin(at)
            rows = self._peek + self._pull(self._global_batch - len(self._peek))
            self._peek = self._pull(self._early)
        if begins:
            self._refuse_other_rows(at, rows)
        self._after = Position(at.epoch, at.offset + len(rows), at.steps + 1)
        if len(self._peek) < self._early:
            self._items, self._after = None, Position(at.epoch + 1, 0, at.steps + 1)
            self.samples = at.offset + len(rows)
        micros = self._keep(len(rows)).micros
        self.total, self.own = len(rows), sum(map(len, micros))
        for i, where in enumerate(micros):
            mine = rows[where.start : where.stop]
            values = self.source.to_device(mine or rows[:1]) if mine or self._borrow else None
            self._pending.append(Batch(values, len(mine), i == len(micros) - 1))

    def _begin(self, at: Position) -> None:
        self._items = self.source.items(at.epoch)
        for _ in range(at.offset):
            next(self._items, None)
        self._peek = self._pull(self._early)
        self._refuse_nothing(at)

    def _refuse_other_rows(self, at: Position, rows: list[Any]) -> None:
        if self._agree is not None and not self._agree(at, row_digest(rows)):
            raise TaskError(
                f"the training stream gives other samples on this rank than on the others in epoch "
                f"{at.epoch + 1}, but every rank reads the whole stream and keeps its part: it "
                "looks at its rank (RANK, WORLD_SIZE), or draws from random numbers that nobody "
                "seeded; do not divide it in the dataset, the run does that, and draw from torch, "
                "numpy or random, whose seeds are alike on all ranks"
            )

    def _refuse_nothing(self, at: Position) -> None:
        if not self._peek:
            raise TaskError(
                f"the training stream gave no sample in epoch {at.epoch + 1}; an IterableDataset "
                "must give at least one per epoch"
            )
        if len(self._peek) < self._early:
            raise TaskError(
                f"drop_last=True leaves nothing of epoch {at.epoch + 1}: the training stream has "
                f"{len(self._peek)} samples, a step takes {self._global_batch}; lower batch="
            )

    def close(self) -> None: ...

    def _pull(self, n: int) -> list[Any]:
        assert self._items is not None
        return [row for _, row in zip(range(n), self._items, strict=False)]


def _wanted(steps: Iterator[StepSamples], order: EpochOrder) -> Iterator[list[int]]:
    """The indices of every micro-batch, each with the order of its own epoch: loader processes
    prefetch across the end of an epoch."""
    epoch, indices = -1, torch.empty(0)
    for step in steps:
        if step.position.epoch != epoch:
            epoch, indices = step.position.epoch, order(step.position.epoch)
        for where in step.micros:
            if len(where):
                yield indices[where.start : where.stop].tolist()
