"""Run limits: when a run ends, when a block of local steps ends, up to which step a rank may claim.

Under strategies that keep ranks in step, all ranks know their common position in the data and
decide alike. Asynchronous ranks claim steps from a shared counter (`StepClaimer`), never beyond
the next step at which all ranks have something to do together: a sync point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.core import Goal, Position
from manyhands.data.drawn import ENDLESS_EPOCH
from manyhands.trainer_parts import DataProgress, EarlyStop, StepClaimer


@dataclass
class Limits:
    """How long a run is, and how often it evaluates and saves."""

    data: DataProgress
    epochs: float  # stop after this many, or after `steps`, whichever comes first; inf: no limit
    steps: float
    evaluate_every: int | None = None  # steps, besides the end of each epoch
    save_every: int | None = None  # rounds; 0: at the end of each epoch; None: never
    save_evaluated: bool = False  # save after each evaluation too, so that the best can be kept
    claims: StepClaimer | None = None  # of an asynchronous rank
    change_at: Goal | None = None  # at which such ranks must sync, to change the strategy
    ending: bool = False  # the user's own loop is over on this rank
    early: EarlyStop | None = None  # of ranks that step together: a request may end their block

    @property
    def block_cut(self) -> bool:
        """Whether a request to stop has ended the last block of local steps; on all ranks alike."""
        return self.early is not None and self.early.cut

    @property
    def endless(self) -> bool:
        """Whether the data has no epochs: a script draws its own batches."""
        return self.data.samples == ENDLESS_EPOCH

    def at_end(self) -> bool:
        """Whether all steps or epochs that were asked for are done."""
        at = self.data.position
        return at.steps >= self.steps or self.epochs_at(at) >= self.epochs - 1e-9

    def block_ends(self) -> bool:
        """Whether a block of local steps, taken without the other ranks, ends here."""
        return self.at_end() if self.claims is None else not self.claim() or self.claims.alone

    def saves(self, before: int, now: int) -> bool:
        """Whether a checkpoint is due after rounds `before` to `now`, of which a batch may have
        several; where ranks are asynchronous, after steps: they count other rounds."""
        every = self.save_every or 0
        return every > 0 and now // every > before // every

    def claim(self) -> bool:
        """Claim a step for this rank; False: there is none before the next sync point."""
        assert self.claims is not None
        at = self.data.position
        periods = [every for every in (self.evaluate_every, self.save_every) if every]
        next_due: list[float] = [(at.steps // every + 1) * every for every in periods]
        epoch_end = self.claims.steps_to(min(self.epochs, at.epoch + 1))
        next_due.append(self._change_due(self.claims))
        return self.claims.claim(min(self.steps, epoch_end, *next_due))

    def _change_due(self, claims: StepClaimer) -> float:
        """The step before which the strategy does not change; inf: only an evaluation can tell."""
        goal = self.change_at
        if goal is None or goal.name not in ("step", "epoch"):
            return math.inf
        due = math.ceil(goal.bound) if goal.name == "step" else claims.steps_to(goal.bound)
        return max(due, self.data.position.steps + 1)

    def end_here(self) -> None:
        """The user's own loop is over: end with what is done. Where ranks are asynchronous, the run
        is over for all of them when it is over for the first."""
        if self.claims is None:
            self.steps = self.data.position.steps
        else:
            self.ending = True
            self.claims.stop_claiming()

    def epochs_at(self, at: Position) -> float:
        """Epochs done at a position, as a fraction."""
        samples = self.data.samples
        # a stream may be longer in one epoch than in the last: only its end ends the epoch
        return at.epoch + min(at.offset / samples, 1 - 1e-6) if samples else float(at.epoch)

    def samples_between(self, before: Position, at: Position) -> int:
        return (at.epoch - before.epoch) * (self.data.samples or 0) + at.offset - before.offset
