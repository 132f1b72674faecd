"""Training loop: split -> compute -> exchange -> merge, round after round. Read this file first.

    while there is work:
        loss = strategy.round(replica, link, state)       # everything distributed happens here
        at the same round on every rank: share status, evaluate, save, change the strategy

A round ends on every rank or raises on every rank. All ranks hold the same position in the data,
so they agree on epochs, evaluations and checkpoints without asking. What only one rank can know (a
signal, a NaN) is shared by one small all-reduce about four times a second, at a round that all
ranks know beforehand.

Under a strategy over servers ranks are asynchronous. Each claims its next step from a shared
counter (`StepClaimer`), up to the next sync point: a step at which all ranks evaluate or save, or
at which one of them has requested a sync.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands import divergence, merged_model, run_end, strategy_change
from manyhands.callbacks.gradient_hook import GradientHook
from manyhands.callbacks.hooks import Hooks
from manyhands.callbacks.shown_model import ShownModel
from manyhands.callbacks.stop_request import StopRequest, agreed_reason
from manyhands.core import Event, Goal, LoopReplica, Position, Result, Tensors
from manyhands.errors import NotFinite, PeerLost
from manyhands.limits import Limits
from manyhands.pace import Pace, RecentLosses
from manyhands.task import Callback
from manyhands.trainer_parts import (
    ActiveStrategy,
    CheckpointWriter,
    EpochChange,
    Evaluator,
    KeptBoundaries,
    LoopContext,
    MeteredGroup,
    Milestones,
    PushedTables,
    StepClaimer,
    StrategyChange,
)

STATUS_EVERY_S = 0.25


@dataclass
class Trainer:
    """Training loop of one rank. `assembly` makes its parts; the loop sees only protocols."""

    context: LoopContext
    active: ActiveStrategy
    replica: LoopReplica
    limits: Limits
    evaluator: Evaluator
    checkpoints: CheckpointWriter
    stop: StopRequest
    until: Goal | None = None  # stop as soon as an evaluation reaches it
    change: StrategyChange | None = None
    tables: PushedTables | None = None
    boundaries: KeptBoundaries | None = None  # of an elastic run between ranks
    around_round: AbstractContextManager[Any] = field(default_factory=nullcontext)
    callbacks: Sequence[Callback] = ()
    run: Any = None  # what callbacks are given
    shown: ShownModel = field(default_factory=lambda: ShownModel(()))
    gradient_hook: GradientHook | None = None
    round: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._losses = RecentLosses()
        self.pace = Pace(self.limits, self.round)
        self._next_status = self.round + 1
        self.done = Milestones(self.round, self.round, self.round or -1)
        self._loss, self._noise = math.nan, math.nan
        self._counts = False  # whether any loss has counted
        self.hooks = Hooks(self.callbacks, self.run)
        self._ended_by: str | None = None  # the reason of run.stop, as all ranks know
        self._stop = self._leaves = self._keeps = False  # at this boundary, as all ranks know
        self._reached = self.round > 0 and self._reaches_goal()

    @property
    def group(self) -> MeteredGroup:
        return self.context.group

    @property
    def position(self) -> Position:
        return self.limits.data.position

    # -- the loop --

    def loop(self) -> Result:
        try:
            if self.finished():
                self.notice("nothing left to do: this run is at its end already")
            if self.boundaries is not None:
                self.boundaries.keep(self.round)
            self.hooks.call("on_start", self.round)
            if not self.position.offset:
                self._begin_epoch()
            while not self.finished():
                self.step()
            return self.finish()
        except (Exception, KeyboardInterrupt) as error:
            if self.boundaries is not None and isinstance(error, EpochChange | PeerLost):
                raise  # the run goes on
            self.hooks.failed(error)
            raise

    def step(self) -> None:
        """One round or one sync point, then what is due: evaluation, change, checkpoint."""
        # a run may resume right where its strategy was to change
        strategy_change.change_when_due(self)
        before, earlier, claims = self.position, self.round, self.limits.claims
        if claims is None:
            self._round()
            while not self.replica.batch_over():  # it has several optimizer steps
                self._round()
            asked = self.group.size == 1 and self.stop.requested
            if self.round >= self._next_status or self.limits.block_cut or asked:
                self.share_status()
        elif self.limits.claim():
            self._round()
            return self._check_between_syncs(claims)
        else:
            self._sync(claims)
        at, every = self.position, self.limits.evaluate_every
        if at.epoch > before.epoch:
            self._end_epochs(range(before.epoch, at.epoch))
        elif every and at.steps // every > before.steps // every:
            self.share_status()
            self._evaluate()
            self._agree_to_end()
        strategy_change.change_when_due(self)
        done = (earlier, self.round) if claims is None else (before.steps, at.steps)
        if self.limits.saves(*done) and self.done.saved != self.round and not self.finished():
            self.checkpoint()  # else evaluate first
        self._pass_boundary()

    def _pass_boundary(self) -> None:
        """All that was due after this round is done: keep the state, or leave with it."""
        boundaries = self.boundaries
        if boundaries is not None and self._leaves and not self.finished():
            boundaries.leave(self.round)
        if boundaries is not None and self._keeps:
            boundaries.keep(self.round)
        self._leaves = self._keeps = False

    def _round(self) -> None:
        started, clock, active = time.time(), time.perf_counter(), self.active
        self.group.round = self.round + 1
        try:
            with self.around_round:
                loss = active.strategy.round(self.replica, active.link, active.state)
        except NotFinite as e:
            raise divergence.refused(self, e, self.round + 1) from e
        self.round += 1
        self._losses.add(self.round, loss, self.replica.own_count)
        self._emit("round", started, time.perf_counter() - clock)
        self.hooks.call("on_round", self.round, self.round, loss)

    def call_gradient_hooks(self) -> None:
        self.hooks.call("on_gradient", self.round + 1)

    def finished(self) -> bool:
        ended = self._stop or self._ended_by is not None
        return ended or self._reached or self.limits.at_end()

    def finish(self) -> Result:
        self.share_status()
        if not self._stop and self.round > max(self.done.first, self.done.evaluated):
            self._evaluate()  # steps= may end in the middle of an epoch
        run_end.save_last(self, cut=self._stop)
        seconds = time.perf_counter() - self.pace.started
        result = Result(
            str(self.context.directory),
            self.round,
            self.limits.epochs_at(self.position),
            seconds,
            self.pace.samples / max(seconds, 1e-9),
            {**self.metrics, "train_loss": self.pace.train_loss()},
            stopped=(self.stop.signal or signal.SIGTERM) if self._stop else 0,
            checkpoint=self.checkpoints.last_good(),
            ranks=self.group.size,
            stop_reason=self._ended_by,
        )
        run_end.leave_shown(self)
        self.hooks.call("on_end", self.round)
        if self.context.leads:
            value = {**result.metrics, "samples_per_s": result.samples_per_s}
            self._emit("finish", None, seconds, value)
        self.context.recorder.flush()
        return result

    # -- asynchronous ranks --

    def _check_between_syncs(self, claims: StepClaimer) -> None:
        """Request a sync where there is a reason for one; rank 0 reports progress."""
        now = time.perf_counter()
        if now - self.pace.looked < STATUS_EVERY_S:
            return
        losses = self._losses
        losses.read()
        if self.stop.requested or losses.bad_round:
            claims.request_sync()
        own, self._counts = losses.mean(self._loss), self._counts or losses.count > 0
        self._loss = own if math.isfinite(own) else self._loss
        self._progress(now, now - self.pace.looked, claims.latest)

    def _sync(self, claims: StepClaimer) -> None:
        """All ranks have computed what they claimed: they agree on one position and round."""
        self.flush_pushes()
        mine = [claims.claimed_steps(), self.round, int(self.limits.ending)]
        reached = torch.tensor(mine, dtype=torch.int64, device=self.context.device)
        self.group.all_reduce({"sync": reached}, op="max").wait()
        steps, self.round, ending = reached.tolist()
        self.limits.ending, self.group.round = bool(ending), self.round
        claims.sync(steps)
        self.limits.steps = steps if ending else self.limits.steps
        self.share_status()

    # -- what ranks must agree on --

    def share_status(self) -> None:
        """Share what only one rank may know: a signal, a loss that is not finite, its mean loss."""
        self.flush_pushes()
        now = time.perf_counter()
        rounds, elapsed = self.round - self.pace.round, now - self.pace.looked
        losses, noise = self._losses, self.active.noise
        losses.read()
        size, rank, named = self.group.size, self.group.rank, self.replica.losses
        shared = torch.cat([torch.zeros(7 + size + 5, dtype=torch.float64), named.take()])
        shared[0], shared[6] = float(self.stop.signal > 0), float(self.stop.reason is not None)
        shared[1], shared[2] = losses.total, losses.count
        if rank == 0:
            shared[3] = max(1, min(1000, int(STATUS_EVERY_S * rounds / max(elapsed, 1e-9))))
        if self.boundaries is not None:
            shared[4] = float(self.boundaries.pending())
            shared[5] = float(rank == 0 and self.boundaries.wants_to_keep())
        shared[7 + rank] = losses.bad_round
        shared = shared.to(self.context.device) if self.context.device.type == "cuda" else shared
        if noise is not None:
            shared[7 + size : 12 + size] = noise.take()
        self.group.all_reduce({"status": shared}).wait()
        stop, total, count, interval, leaves, keeps, asked, *rest = shared.tolist()
        if noise is not None:
            self._noise = noise.read(rest[size : size + 5])
        named.read(rest[size + 5 :])
        self._stop = self._stop or stop > 0
        self._leaves, self._keeps = self._leaves or leaves > 0, self._keeps or keeps > 0
        self._next_status = self.round + int(interval)
        self._loss = total / count if count else self._loss
        self._counts = self._counts or count > 0
        self.pace.add(total, count)
        losses.clear()
        if any(rest[:size]):
            divergence.diverged(self, rest[:size])
        if asked:
            self._agree_to_end()
        self._progress(now, elapsed, self.position)

    def _progress(self, now: float, elapsed: float, at: Position) -> None:
        advanced = self.round > self.pace.round
        exchange_share = self.pace.look(now, elapsed, at, self.round, self.group.seconds)
        if self.context.leads and advanced:
            measured = {"exchange_share": exchange_share}
            if self._counts:  # the one short block of a loop counts none, which is no loss of NaN
                measured["loss"] = self._loss
            more = {"noise": self._noise, "lr": self.replica.lr}
            measured |= {k: v for k, v in more.items() if math.isfinite(v)}
            measured |= {f"loss/{k}": v for k, v in self.replica.losses.means.items()}
            self._emit("progress", value=self.pace.progress(now, at, measured))
        if self.tables is not None:
            self.tables.report(self.round)
        self.context.recorder.flush()

    def flush_pushes(self) -> None:
        """Wait until this rank's pushes are applied; a server may refuse one after its round."""
        try:
            if self.tables is not None:
                self.tables.flush()
        except NotFinite as e:
            raise divergence.refused(self, e, self.round) from e

    # -- evaluation, checkpoints and changes of strategy, at rounds that all ranks know --

    def _end_epochs(self, epochs: range) -> None:
        """One epoch, or several where a strategy's block is longer than an epoch."""
        self.share_status()
        self.pace.end_epoch(epochs[0], self.replica.closing)
        self.shown.advance(self)
        self._evaluate()
        for epoch in epochs:
            if epoch > epochs[0]:
                self.hooks.call("on_epoch_start", self.round, epoch)
            self.hooks.call("on_epoch", self.round, epoch, self.metrics)
        self._agree_to_end()
        save_every = self.limits.save_every
        if save_every == 0 or (save_every and self.limits.save_evaluated):
            self.checkpoint()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        if not self.finished():
            self.hooks.call("on_epoch_start", self.round, self.position.epoch)

    def _agree_to_end(self) -> None:
        """Whether `run.stop` was called on some rank; every rank asks after the same round."""
        if self._ended_by is None:
            reason = self.stop.reason
            self._ended_by = agreed_reason(self.group, self.context.device, reason)
            if self._ended_by is not None:
                said = f": {self._ended_by}" if self._ended_by else ""
                self.notice(f"run.stop() ends the run after round {self.round}{said}")

    def _evaluate(self) -> None:
        started, clock = time.time(), time.perf_counter()
        self.done.evaluated = self.round
        if self.evaluator.has_data:
            with self.merged():
                self.metrics = self.evaluator.evaluate() or self.metrics
        self._reached = self._reached or self._reaches_goal()
        if self.metrics:
            at = self.position
            where = {"epoch": self.limits.epochs_at(at), "step": float(at.steps)}
            self._emit("evaluate", started, time.perf_counter() - clock, {**where, **self.metrics})
            self.context.recorder.flush()
        if self.evaluator.has_data:
            self.hooks.call("on_evaluate", self.round, self.metrics)

    def checkpoint(self) -> None:
        self.share_status()
        divergence.refuse_nan(self)
        self.done.saved = self.round
        started, clock = time.time(), time.perf_counter()
        self.evaluator.average_buffers()
        self.shown.advance(self)
        snapshot = self.checkpoints.take(self.round, self.active, self.metrics)
        evaluated = self.metrics if self.done.evaluated == self.round else {}
        path = self.checkpoints.save(snapshot, evaluated)
        self.hooks.call("on_checkpoint", self.round, path)
        self._emit("snapshot", started, time.perf_counter() - clock)

    def merged(self) -> AbstractContextManager[None]:
        """For a while the replica holds the one model that all replicas stand for."""
        return merged_model.merged(self)

    def model(self) -> Tensors:
        """What all replicas stand for, as flat vectors of the replica; every rank calls it."""
        model = merged_model.consensus(self)
        return self.replica.params if model is None else model

    # -- from one trainer of a run to the next --

    def go_on_from(self, round: int, done: Milestones, pace: dict[str, float]) -> None:
        """Go on after `round`, in place of a trainer that had come so far."""
        self.round = round
        self.__post_init__()
        self.done = done
        self.pace.restore(pace)

    def end_here(self) -> None:
        """Save and end before the next round; every rank calls it."""
        self._stop = True

    # -- small things --

    def _reaches_goal(self) -> bool:
        return self.until is not None and self.until.reached(self.known())

    def known(self) -> dict[str, float]:
        """What a goal may name; the same on every rank."""
        at = self.position
        run = {"epoch": self.limits.epochs_at(at), "step": float(at.steps), "noise": self._noise}
        return {**self.metrics, **run}

    def notice(self, text: str) -> None:
        if self.context.leads:
            self._emit("notice", value=text)

    def _emit(
        self,
        name: str,
        time_s: float | None = None,
        seconds: float = 0.0,
        value: str | dict[str, float] | None = None,
    ) -> None:
        when, rank = time.time() if time_s is None else time_s, self.group.rank
        self.context.recorder.emit(Event(when, rank, self.round, name, seconds, value=value))
