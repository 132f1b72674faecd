"""Data of a user's own loop: one iteration is one epoch, and every batch of it wants a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from manyhands.data.batches import BatchIterator
from manyhands.errors import TaskError
from manyhands.exchange.activity import ROUNDS, SCRIPT

ACCUMULATES = (
    "had loss.backward() and no run.step(): the script accumulates gradients itself, which several "
    "ranks would do unlike one; call run.step(loss) for every batch, with the loss undivided, and "
    "say accumulate=4 in the plan for steps of 4 batches"
)
LEFT_OUT = (
    "had no run.step(loss), which the other ranks wait for; call it for every batch, as "
    "run.step(loss, count=0) where it is not to count"
)
NOT_TRAINED = "had no run.step(loss): its samples are not trained on"


class PlannedOrder:
    """In place of a DataLoader's sampler: the plan orders and divides the samples."""

    def set_epoch(self, epoch: int) -> None:
        """Nothing: a run counts its epochs itself."""


class LoopData:
    """This rank's batches, epoch by epoch. Epochs that a resumed run has done are over at once.

    It has what scripts ask a DataLoader for: `len`, `dataset`, `batch_size` (of this rank) and
    `sampler`, whose `set_epoch` does no harm."""

    def __init__(self, run: Any, batches: BatchIterator, given: Any, batch_size: int | None):
        self._run, self._batches, self._started = run, batches, 0
        self._iterating = self._left = False
        self.dataset, self.batch_size = _dataset(given), batch_size
        self.sampler = PlannedOrder()

    def __iter__(self) -> Iterator[Any]:
        if self._run.stopped:
            return
        asked, epoch = self._started, self._batches.position.epoch
        self._started += 1
        if self._iterating:
            raise TaskError(
                "the data of run.prepare is being iterated over already; one loop at a time: give "
                "an inner loop the plain data"
            )
        if self._left and self._batches.position.offset:
            self._run._context.warn(
                "a loop was left in the middle of an epoch (break, next(iter(data))): the next one "
                "goes on with the rest of that epoch, not from its beginning"
            )
        self._iterating, self._left = True, True
        activity = self._run._context.group.activity
        if activity.phase == SCRIPT:
            activity.change(ROUNDS)
        try:
            yield from self._epoch(epoch, asked)
            self._left = False
        finally:
            self._iterating = False
            activity.change(SCRIPT)  # it may evaluate now, or write, for as long as it likes

    def _epoch(self, epoch: int, asked: int) -> Iterator[Any]:
        given = skipped = 0
        said = False
        self._run._end_batch()  # one that a loop before was left in
        # to the end of this epoch; after a `break`, the rest of it
        while self._batches.position.epoch == epoch <= asked and not self._run.stopped:
            self._run._coroutine.claim_step()
            batch = self._batches.next()
            self._run._batch = batch
            if batch.values is None:  # no sample left for this rank, but the others wait for it
                self._run._take_part(batch.last)
                if batch.last:
                    self._run._end_batch()
                continue
            given, self._run._stepped = given + 1, False
            yield batch.values
            if not self._run._stepped:
                skipped += 1
                self._not_stepped(given, said)
                said = True
            if batch.last:
                self._run._end_batch()
        if given and skipped == given:
            raise TaskError(
                f"an epoch of {given} batches has trained nothing: run.step(loss) was never "
                "called; call it for every batch, or iterate over the plain data to evaluate"
            )

    def _not_stepped(self, given: int, said: bool) -> None:
        """Every rank must step at every batch: a rank that leaves one out would merge its next
        gradient with the others' present one."""
        alone = self._run.size == 1
        text = NOT_TRAINED if alone else LEFT_OUT
        text = ACCUMULATES if self._run._has_gradients() else text
        text = f"batch {given} of the epoch {text}"
        if not alone:
            raise TaskError(text)
        if not said:
            self._run._context.warn(text)

    def __len__(self) -> int:
        """Batches that an iteration gives: with accumulate= several are one step."""
        found = self._batches.batches_per_epoch
        if found is None:
            raise TypeError("a stream has no length")
        return found


def _dataset(given: Any) -> Any:
    """What has the samples, for `len(data.dataset)`."""
    if isinstance(given, DataLoader):
        return given.dataset
    columns = isinstance(given, tuple) and all(isinstance(v, Tensor) for v in given)
    return TensorDataset(*given) if columns else given
