"""Drawn steps: what takes the place of data where the user's script draws its own batches.

Every `run.step` is one batch of this rank. Ranks draw different numbers, as each is seeded by seed
and rank; where their losses are equal to the bit all the same, something has seeded them alike.
"""

from __future__ import annotations

from torch import Tensor

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Result
from manyhands.data.batches import Batch, BatchIterator
from manyhands.own_loop.coroutine import TrainerCoroutine
from manyhands.own_loop.loop_ends import LoopEnds

LOOK_AT = 2  # the first loss may be the same for all batches: of a last layer of zeros

SAME_BATCHES = (
    "the losses of all ranks are equal to the bit: they seem to draw the same batches, so that "
    "{size} ranks do the work of one; seed by the rank (torch.manual_seed(seed + run.rank)), or "
    "leave out what seeds after run.prepare, which seeds each rank on its own"
)


class DrawnSteps:
    """Steps of one rank, in place of its data."""

    def __init__(self, context: RankContext, batches: BatchIterator, coroutine: TrainerCoroutine):
        self._context, self._batches, self._coroutine = context, batches, coroutine
        self.ends: LoopEnds | None = None  # of ranks that step together
        rank, size = context.rank, context.process.size
        if size > 1 and not coroutine.claims_steps:
            self.ends = LoopEnds(context.store, rank, size, batches.position.steps)
            context.to_close.append(self.ends.close)
        self._seen = 0
        self._unlike = size == 1  # no need to look at losses any more

    def next(self) -> Batch:
        """Begin a micro-batch."""
        self._coroutine.claim_step()
        batch = self._batches.next()
        if batch.last and self.ends is not None:
            self.ends.begin_step()
        return batch

    def follow(self, searches: bool) -> Result | None:
        """This rank's loop is over: take part in the others' steps, without samples. The result:
        the run was told to stop."""
        if self.ends is None:
            return None
        ended: Result | None = None

        def step() -> bool:
            nonlocal ended
            last = False
            while not last and ended is None:
                last = self._batches.next().last
                ended = self._coroutine.take_part(last, searches)
            return ended is None

        self.ends.follow(step)
        return ended

    def look_at(self, loss: Tensor | None) -> None:
        """Rank 0 warns if all ranks have the same loss."""
        if self._unlike or loss is None:
            return
        store, rank, size = self._context.store, self._context.rank, self._context.process.size
        self._seen += 1
        if self._seen == LOOK_AT:
            store.set(f"drawn loss/{rank}", f"{float(loss.detach()):.17g}")
        keys = [f"drawn loss/{r}" for r in range(size)]
        if self._seen < LOOK_AT or (rank == 0 and not store.check(keys)):
            return
        self._unlike = True
        if rank == 0 and len({bytes(store.get(key)) for key in keys}) == 1:
            self._context.warn(SAME_BATCHES.format(size=size))
