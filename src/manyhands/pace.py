"""Pace of a run: the mean loss of the last rounds, samples per second, seconds left."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.core import Position
from manyhands.errors import TaskError
from manyhands.limits import Limits


class RecentLosses:
    """Losses of this rank since the last exchange of status; read from the device in bulk."""

    def __init__(self) -> None:
        self._unread: list[tuple[int, Tensor, int]] = []  # round, mean loss, samples behind it
        self.total = self.count = 0.0  # of the losses read: sum over samples, samples
        self.bad_round = 0.0  # the first round whose loss was not finite; 0: none

    def add(self, round: int, loss: Tensor, count: int) -> None:
        self._unread.append((round, loss, count))

    def read(self) -> None:
        """Read all unread losses at once: on a GPU this waits for them."""
        if not self._unread:
            return
        losses = torch.stack([loss.detach().float() for _, loss, _ in self._unread]).cpu().double()
        counts = torch.tensor([count for *_, count in self._unread], dtype=torch.float64)
        bad = (~losses.isfinite()).nonzero().flatten()
        self.total += float((losses * counts).sum())
        self.count += float(counts.sum())
        if not self.bad_round and len(bad):
            self.bad_round = float(self._unread[int(bad[0])][0])
        self._unread.clear()

    def mean(self, otherwise: float) -> float:
        return self.total / self.count if self.count else otherwise

    def clear(self) -> None:
        self.total = self.count = self.bad_round = 0.0


@dataclass
class Pace:
    """Speed of a run, measured between two looks at it."""

    limits: Limits
    round: int  # at the last look

    def __post_init__(self) -> None:
        self.position = at = self.limits.data.position
        self._first_steps, self._first_epochs = at.steps, self.limits.epochs_at(at)
        self.looked = self.started = time.perf_counter()
        self.rate = 0.0  # samples per second, smoothed
        # of this epoch, over all ranks: losses of samples that counted, and their number
        self._total = self._counted = 0.0
        self._epoch_loss = math.nan  # mean over the last complete epoch
        self.samples = 0
        self._exchange_s = 0.0

    def look(
        self, now: float, elapsed: float, at: Position, round: int, exchange_s: float
    ) -> float:
        """Account for the rounds since the last look; the share of time spent in exchange."""
        seen = self.limits.samples_between(self.position, at)
        if elapsed > 0 and round > self.round:
            rate = seen / elapsed
            self.rate = rate if not self.rate else 0.7 * self.rate + 0.3 * rate
        self.samples += seen
        share = min(1.0, (exchange_s - self._exchange_s) / max(elapsed, 1e-9))
        self._exchange_s, self.looked, self.round, self.position = exchange_s, now, round, at
        return share

    def end_epoch(self, epoch: int, closing: bool) -> None:
        """Refuse an epoch that trained nothing: no sample of it has counted. `closing`: a loop has
        ended among local steps, whose end counts nothing itself."""
        if not self._counted and closing:
            return
        if not self._counted:
            raise TaskError(
                f"epoch {epoch + 1} has trained nothing: every batch had a count of 0; give the "
                "loss alone, or with it the number of samples (or tokens) that it is a mean over"
            )
        self._epoch_loss = self._total / self._counted
        self._total = self._counted = 0.0

    def add(self, total: float, count: float) -> None:
        """Account for `count` samples of this epoch, whose losses add up to `total`."""
        self._total, self._counted = self._total + total, self._counted + count

    def train_loss(self) -> float:
        """Mean over the epoch so far, or over the one that has just ended."""
        return self._total / self._counted if self._counted else self._epoch_loss

    def progress(self, now: float, at: Position, measured: dict[str, float]) -> dict[str, float]:
        """How far the run is, and how fast, beside what else was `measured`."""
        limits = self.limits
        return {
            **({} if limits.endless else {"epoch": limits.epochs_at(at)}),
            **({"epochs": limits.epochs} if math.isfinite(limits.epochs) else {}),
            "samples_per_s": self.rate,
            "eta_s": self.eta_s(now, at),
            "step": float(at.steps),
            **measured,
        }

    def state(self) -> dict[str, float]:
        """What another trainer needs to go on counting; see `restore`."""
        return {
            "total": self._total,
            "counted": self._counted,
            "epoch_loss": self._epoch_loss,
            "samples": self.samples,
            "seconds": time.perf_counter() - self.started,
        }

    def restore(self, saved: dict[str, float]) -> None:
        self._total, self._counted = saved["total"], saved["counted"]
        self._epoch_loss, self.samples = saved["epoch_loss"], int(saved["samples"])
        self.started -= saved["seconds"]

    def eta_s(self, now: float, at: Position) -> float:
        """Seconds left at the mean pace so far, by whichever limit is nearer; NaN: unknown."""
        limits, spent = self.limits, now - self.started
        steps, epochs, first = (
            at.steps - self._first_steps,
            limits.epochs_at(at),
            self._first_epochs,
        )
        by_steps = spent * (limits.steps - at.steps) / steps if steps > 0 else math.inf
        by_epochs = (
            spent * (limits.epochs - epochs) / (epochs - first) if epochs > first else math.inf
        )
        left = max(0.0, min(by_steps, by_epochs))
        return left if math.isfinite(left) else math.nan
