"""The loop: split -> compute -> exchange -> merge, round after round. Read this file first.

    while there is work:
        loss = strategy.round(replica, link, state)       # everything that is distributed happens here
        now and then, on the same round on every rank:    look (stop asked? loss finite?), evaluate, save, change the rule

A round ends on every rank or raises on every rank. All ranks hold the same position in the data, so they agree on
epochs, evaluations and checkpoints without asking; what only one of them can know (a signal, a NaN) is shared by one
small all-reduce about four times a second, at a round that all of them know beforehand.

Under a rule over servers ranks keep no step with each other. Each draws the number of its next step from a `StepClaimer`, up to the
next step where there is something to do together; when none is left, or somebody has called, all meet there.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.core import (
    Event,
    Goal,
    Group,
    LoopReplica,
    Position,
    Snapshot,
)
from manyhands.errors import Diverged, NotFinite
from manyhands.task import Callback
from manyhands.trainer_parts import ActiveStrategy, MeteredGroup, StepClaimer

LOOK_EVERY_S = 0.25


@dataclass
class Result:
    """How a run ended."""

    directory: str
    rounds: int
    epochs: float
    seconds: float
    samples_per_s: float
    metrics: dict[str, float]
    stopped: int = 0  # the number of the signal that ended it early
    checkpoint: str | None = None


@dataclass
class Trainer:
    """One rank's part in a run. `build` puts the parts together; nothing here knows which ones they are."""

    rule: ActiveStrategy
    replica: LoopReplica
    link: MeteredGroup  # between all ranks
    merging: Group  # between replicas: where a model is split over ranks, those that hold the same part of it
    position: Callable[[], Position]
    epochs: (
        float  # stop after this many, or after so many steps, whichever comes first; inf: no limit
    )
    steps: float
    samples: Callable[[], int | None]  # of one epoch; None while a stream has not ended once
    emit: Callable[[Event], None]
    flush: Callable[[], None]
    evaluate: Callable[[], dict[str, float]] | None  # None: there is nothing to evaluate on
    snapshot: Callable[[int, ActiveStrategy], Snapshot]
    save: Callable[[Snapshot, dict[str, float]], None]
    last_good: Callable[[], str | None]
    save_every: int | None  # rounds; 0: at the end of each epoch; None: never
    save_evaluated: bool  # also wherever it was evaluated, so that the best can be kept
    stop_requested: Callable[[], int]  # the number of a signal, or 0
    agree: Callable[[], None]  # on what is no parameter but is evaluated too: running statistics
    directory: str
    device: torch.device
    until: Goal | None = None  # stop as soon as an evaluation reaches it
    evaluate_every: int | None = None  # steps, besides the end of each epoch
    change_at: Goal | None = None
    change: Callable[[], ActiveStrategy] | None = None  # to the rule that comes after this one
    dealer: StepClaimer | None = None
    serves: bool = False  # there are tables on servers, or in this process
    settle: Callable[[], None] = lambda: (
        None
    )  # come back when what this rank sent to servers has arrived
    tell: Callable[[int], None] = lambda round: None  # what servers say of themselves
    measured: Callable[[], AbstractContextManager[Any]] = nullcontext  # around every round
    callbacks: Sequence[Callback] = ()
    round: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    run: Any = None

    def __post_init__(self) -> None:
        self._losses: list[tuple[int, Tensor, int]] = []  # round, mean loss, samples behind it
        self._folded = [
            0.0,
            0.0,
            0.0,
        ]  # of losses read already: their sum, samples behind it, the first round that was not finite
        self._at_look = self.position()
        self._first_epochs, self._first_steps = self._epochs(self._at_look), self._at_look.steps
        self._next_look = self.round + 1
        self._looked = self._started = time.perf_counter()
        self._looked_at = self._first = self.round
        self._exchange_before = 0.0
        self._samples_seen = 0
        self._rate = 0.0
        self._loss = math.nan
        self._stop = self._reached = False
        self._ending: bool | int = False
        self._noise = math.nan
        self._evaluated = self.round
        self._saved = self.round or -1  # what was resumed is saved already
        self._reached = (
            self.round > 0 and self.until is not None and self.until.reached(self._known())
        )

    # -- the loop --

    def loop(self) -> Result:
        try:
            if self.finished() and self.link.rank == 0:
                said = "nothing left to do: this run is at its end already"
                self.emit(Event(time.time(), 0, self.round, "notice", value=said))
            while not self.finished():
                self.step()
            return self.finish()
        except (Exception, KeyboardInterrupt) as error:
            for callback in self.callbacks:
                callback.on_failure(self.run, error)
            raise

    def step(self) -> None:
        self._change_when_due()  # a run may resume right where its rule was to change
        before = self.position()
        if self.dealer is None:
            self._round()
            if self.round >= self._next_look:
                self.look()
        elif self.claim():
            self._round()
            return self._watch(self.dealer)
        else:
            self._meet(self.dealer)
        at = self.position()
        if at.epoch > before.epoch:
            self._end_epochs(range(before.epoch, at.epoch))
        elif (
            self.evaluate_every
            and at.steps // self.evaluate_every > before.steps // self.evaluate_every
        ):
            self.look()
            self._evaluate()
        self._change_when_due()
        done = (
            self.round if self.dealer is None else at.steps
        )  # rounds of ranks that go at their own pace are no measure
        due = self.save_every and done % self.save_every == 0
        if (
            due and self._saved != self.round and not self.finished()
        ):  # at the end, evaluation comes first
            self.checkpoint()

    def _round(self) -> None:
        started = time.time()
        clock = time.perf_counter()
        self.link.round = self.round + 1
        try:
            with self.measured():
                loss = self.rule.strategy.round(self.replica, self.rule.link, self.rule.state)
        except NotFinite as e:
            raise self._refused(e, self.round + 1) from e
        self.round += 1
        self._losses.append((self.round, loss, self.replica.own_count))
        self.emit(Event(started, self.link.rank, self.round, "round", time.perf_counter() - clock))
        for callback in self.callbacks:
            callback.on_round(self.run, self.round, loss)

    # -- at one's own pace --

    def claim(self) -> bool:
        """Whether there is a step to compute before the next meeting."""
        assert self.dealer is not None
        at = self.position()
        rhythms = [every for every in (self.evaluate_every, self.save_every) if every]
        limits = [(at.steps // every + 1) * every for every in rhythms]
        return self.dealer.claim(
            min(self.steps, self.dealer.steps_to(min(self.epochs, at.epoch + 1)), *limits)
        )

    def end_here(self) -> None:
        """What was asked for ends with what is done: a loop of one's own is over. Where ranks go at their own pace, it is over
        for all of them when it is for the first."""
        if self.dealer is None:
            self.steps = self.position().steps
        else:
            self._ending = True
            self.dealer.stop_claiming()

    def block_ends(self) -> bool:
        """Whether a block of steps that a rule takes without its peers is to end here."""
        return self.at_end() if self.dealer is None else not self.claim()

    def _watch(self, dealer: StepClaimer) -> None:
        """Between meetings: is there a reason to call one? And rank 0 tells how far it sees the run to be."""
        now = time.perf_counter()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._fold()
        if self.stop_requested() or self._folded[2]:
            dealer.request_sync()
        own = self._folded[0] / self._folded[1] if self._folded[1] else self._loss
        self._loss = own if math.isfinite(own) else self._loss
        self._progress(now, now - self._looked, dealer.latest)

    def _meet(self, dealer: StepClaimer) -> None:
        """Everybody comes, with all that was drawn computed: from here on all know the same position and round."""
        self._settle()
        reached = torch.tensor(
            [dealer.claimed_steps(), self.round, int(self._ending)],
            dtype=torch.int64,
            device=self.device,
        )
        self.link.all_reduce({"meeting": reached}, op="max").wait()
        steps, self.round, self._ending = reached.tolist()
        self.link.round = self.round
        dealer.sync(steps)
        self.steps = steps if self._ending else self.steps
        self.look()

    def finished(self) -> bool:
        return self._stop or self._reached or self.at_end()

    def at_end(self) -> bool:
        """Whether all the steps or epochs that were asked for are done."""
        at = self.position()
        return at.steps >= self.steps or self._epochs(at) >= self.epochs - 1e-9

    def finish(self) -> Result:
        self.look()
        if not self._stop and self.round > max(
            self._first, self._evaluated
        ):  # steps= may end in the middle of an epoch
            self._evaluate()
        if self.save_every is not None and self._saved != self.round:
            self.checkpoint()
        seconds = time.perf_counter() - self._started
        at = self.position()
        result = Result(
            self.directory, self.round, self._epochs(at), seconds, self._samples_seen / max(seconds, 1e-9), {**self.metrics, "train_loss": self._loss},
            stopped=(self.stop_requested() or signal.SIGTERM) if self._stop else 0, checkpoint=self.last_good(),
        )  # fmt: skip
        for callback in self.callbacks:
            callback.on_end(self.run)
        if self.link.rank == 0:
            self.emit(
                Event(
                    time.time(),
                    0,
                    self.round,
                    "finish",
                    seconds,
                    value={**result.metrics, "samples_per_s": result.samples_per_s},
                )
            )
        self.flush()
        return result

    # -- what ranks must agree on --

    def look(self) -> None:
        """Share what only one rank may know: a signal, a loss that is not finite; and the mean loss over all ranks."""
        self._settle()
        now = time.perf_counter()
        rounds, elapsed = self.round - self._looked_at, now - self._looked
        self._fold()
        size, rank = self.link.size, self.link.rank
        shared = torch.zeros(4 + size + 5, dtype=torch.float64)
        shared[0] = float(self.stop_requested() > 0)
        shared[1], shared[2] = self._folded[:2]
        shared[3] = (
            max(1, min(1000, int(LOOK_EVERY_S * rounds / max(elapsed, 1e-9)))) if rank == 0 else 0.0
        )
        shared[4 + rank] = self._folded[2]
        shared = shared.to(self.device) if self.device.type == "cuda" else shared
        if self.rule.gauge is not None:
            shared[4 + size :] = self.rule.gauge.take()
        self.link.all_reduce({"look": shared}).wait()
        stop, total, count, interval, *rest = shared.tolist()
        diverged = rest[:size]
        if self.rule.gauge is not None:
            self._noise = self.rule.gauge.read(rest[size:])
        self._stop = self._stop or stop > 0
        self._next_look = self.round + int(interval)
        self._loss = total / count if count else self._loss
        self._folded = [0.0, 0.0, 0.0]
        if any(diverged):
            self._diverged(diverged)
        self._progress(now, elapsed, self.position())

    def _fold(self) -> None:
        """Read the losses of the last rounds, all at once: on a GPU that waits for them."""
        if not self._losses:
            return
        losses = torch.stack([loss.detach().float() for _, loss, _ in self._losses]).cpu().double()
        counts = torch.tensor([count for *_, count in self._losses], dtype=torch.float64)
        bad = (~losses.isfinite()).nonzero().flatten()
        self._folded[0] += float((losses * counts).sum())
        self._folded[1] += float(counts.sum())
        self._folded[2] = self._folded[2] or (
            float(self._losses[int(bad[0])][0]) if len(bad) else 0.0
        )
        self._losses.clear()

    def _diverged(self, rounds: list[float]) -> None:
        rank = min((r for r in range(len(rounds)) if rounds[r]), key=lambda r: rounds[r])
        self.last_good()  # rank 0 waits for a save under way, then all know which one is the last
        self.link.all_reduce({"saved": torch.zeros(1, device=self.device)}).wait()
        raise Diverged(
            f"the loss of rank {rank} became NaN or infinite at round {int(rounds[rank])} (epoch {self._epochs(self.position()):.2f}); {self._good()}; "
            "lower the learning rate, clip gradients (clip=1.0) or look at the data of that rank"
        )

    def _refuse_nan(self) -> None:
        """A gradient can be NaN where the loss was finite; such a model is never saved over a good one."""
        found = [(~v.isfinite()).any().float() for v in self.replica.params.values()]
        bad = torch.stack([torch.zeros((), device=self.device), *found]).max().view(1)
        self.link.all_reduce({"bad": bad}, op="max").wait()
        if float(bad) > 0:
            raise Diverged(
                f"parameters became NaN or infinite by round {self.round} (epoch {self._epochs(self.position()):.2f}), though the loss was "
                f"finite; {self._good()}; "
                "clip gradients (clip=1.0) or look for a division by zero in backward"
            )

    def _settle(self) -> None:
        """What this rank sent has arrived, or the run has diverged: a push may be refused after its round is over."""
        try:
            self.settle()
        except NotFinite as e:
            raise self._refused(e, self.round) from e

    def _refused(self, error: NotFinite, round: int) -> Diverged:
        return Diverged(f"rank {self.link.rank}, round {round}: {error}; {self._good()}")

    def _good(self) -> str:
        good = self.last_good()
        return f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"

    def _progress(self, now: float, elapsed: float, at: Position) -> None:
        seen = self._seen(at)
        if elapsed > 0 and self.round > self._looked_at:
            rate = seen / elapsed
            self._rate = rate if not self._rate else 0.7 * self._rate + 0.3 * rate
        self._samples_seen += seen
        waited = self.link.seconds
        if self.link.rank == 0 and self.round > self._looked_at:
            value = {
                "epoch": self._epochs(at),
                **({"epochs": self.epochs} if math.isfinite(self.epochs) else {}),
                "loss": self._loss,
                "samples_per_s": self._rate,
                "exchange_share": min(1.0, (waited - self._exchange_before) / max(elapsed, 1e-9)),
                "eta_s": self._eta(now, at),
                "step": float(at.steps),
                **({"noise": self._noise} if math.isfinite(self._noise) else {}),
            }
            self.emit(Event(time.time(), 0, self.round, "progress", value=value))
        self.tell(self.round)
        self._exchange_before, self._looked, self._looked_at, self._at_look = (
            waited,
            now,
            self.round,
            at,
        )
        self.flush()

    # -- evaluation and checkpoints, at rounds that all ranks know --

    def _end_epochs(self, epochs: range) -> None:
        """One, or several where a rule's block is longer than an epoch."""
        self.look()
        self._evaluate()
        for callback in self.callbacks:
            for epoch in epochs:
                callback.on_epoch(self.run, epoch, self.metrics)
        if self.save_every == 0 or (self.save_every and self.save_evaluated):
            self.checkpoint()

    def _evaluate(self) -> None:
        started, clock = time.time(), time.perf_counter()
        self._evaluated = self.round
        if self.evaluate is not None:
            with self.merged():
                self.metrics = self.evaluate() or self.metrics
        self._reached = self._reached or (
            self.until is not None and self.until.reached(self._known())
        )
        if self.metrics:
            where = {"epoch": self._epochs(self.position()), "step": float(self.position().steps)}
            self.emit(
                Event(
                    started,
                    self.link.rank,
                    self.round,
                    "evaluate",
                    time.perf_counter() - clock,
                    value={**where, **self.metrics},
                )
            )
            self.flush()

    def checkpoint(self) -> None:
        self.look()
        self._refuse_nan()
        self._saved = self.round
        clock = time.perf_counter()
        started = time.time()
        self.save(
            self.snapshot(self.round, self.rule),
            self.metrics if self._evaluated == self.round else {},
        )
        self.emit(
            Event(started, self.link.rank, self.round, "snapshot", time.perf_counter() - clock)
        )

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Hold, for a while, the one model that all replicas stand for; what this rank had comes back after it. Rows on servers
        are what all have pushed, and stay so until all are through."""
        self._barrier()
        with self._holding_merged():
            yield
        self._barrier()

    def _barrier(self) -> None:
        if self.serves:
            self._settle()
            self.link.all_reduce({"settled": torch.zeros(1, device=self.device)}).wait()

    def _holding_merged(self) -> AbstractContextManager[None]:
        self.agree()
        model = self.rule.consensus(self.replica, self.merging)
        if (
            model is None and self.replica.in_block
        ):  # asked for by a loop of one's own among steps that ranks take by themselves
            model = {k: v.clone() for k, v in self.replica.params.items()}
            self.merging.all_reduce(model, op="mean").wait()
        return self.replica.holding(model)

    def _change_when_due(self) -> None:
        if (
            self.change is not None
            and self.change_at is not None
            and self.change_at.reached(self._known())
        ):
            self._change_rule()

    def _change_rule(self) -> None:
        """All go on from what they together stand for, with the mean of what their optimizers remember."""
        assert self.change is not None
        model = self.rule.consensus(self.replica, self.merging)
        if model is not None:
            self.replica.load(model)
        if not self.rule.strategy.replicas_agree:
            self.merging.all_reduce(self.replica.moments, op="mean").wait()
        self.look()  # what was measured under the old rule is read before it goes
        self.rule, self.change = self.change(), None
        if self.link.rank == 0:
            said = f"{self.rule.name} from here on: {self.change_at} is reached"
            self.emit(Event(time.time(), 0, self.round, "notice", value=said))

    # -- arithmetic --

    def _known(self) -> dict[str, float]:
        """What a goal may name; the same on every rank."""
        at = self.position()
        return {
            **self.metrics,
            "epoch": self._epochs(at),
            "step": float(at.steps),
            "noise": self._noise,
        }

    def _epochs(self, at: Position) -> float:
        samples = self.samples()
        # a stream may give more in one epoch than in the one before: only its end ends the epoch
        return at.epoch + min(at.offset / samples, 1 - 1e-6) if samples else float(at.epoch)

    def _seen(self, at: Position) -> int:
        before, samples = self._at_look, self.samples() or 0
        return (at.epoch - before.epoch) * samples + at.offset - before.offset

    def _eta(self, now: float, at: Position) -> float:
        """Seconds left at the mean pace so far, by whichever limit is nearer."""
        spent, done, here = now - self._started, at.steps - self._first_steps, self._epochs(at)
        by_steps = spent * (self.steps - at.steps) / done if done > 0 else math.inf
        by_epochs = (
            spent * (self.epochs - here) / (here - self._first_epochs)
            if here > self._first_epochs
            else math.inf
        )
        left = max(0.0, min(by_steps, by_epochs))
        return left if math.isfinite(left) else math.nan
