"""Gradient noise scale: the batch size beyond which more samples per step help little.

    n_i |g_i|^2  =  n_i |G|^2 + tr S   on average: rank i's own gradient over n_i samples
    B |g|^2      =  B |G|^2 + tr S     the merged one, B = sum_i n_i
                                       G: true gradient, S: its covariance over samples
    tr S     =  (sum_i n_i |g_i|^2 - B |g|^2) / (ranks - 1)
    |G|^2    =  (B |g|^2 - tr S) / B
    B_noise  =  tr S / |G|^2

(McCandlish et al. 2018, arXiv:1812.06162.) Both terms are noisy, so each is averaged over time by
itself and they are divided last; the mean of ratios would be biased. Measured in one round of
`EVERY`, before clipping: two more passes over the gradient then, none otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from manyhands.core import (
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.exchange.wrapper import GroupWrapper

EVERY = 32
KEEP = 0.9  # of what was known, at each reading


class NoiseGauge(GroupWrapper):
    """Group wrapper that measures the noise scale from all-reduces of the gradients in `names` and
    of "count", in every `every`-th round by `round()`."""

    def __init__(
        self,
        group: Group,
        names: Sequence[str],
        round: Callable[[], int],
        device: torch.device,
        every: int = EVERY,
    ):
        super().__init__(group)
        self._names, self._round, self._every = frozenset(names), round, every
        # sums over measured rounds: n |g_i|^2 of this rank, this rank's part of B |g|^2,
        # ranks with samples, rounds, B
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._own = self._merged = torch.zeros((), dtype=torch.float64, device=device)
        self._trace = self._square = math.nan

    # -- the group --

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        if not self._due(op):
            return self.group.all_reduce(values, op)
        if "count" in values:
            own = values["count"].view(-1)[0].double()
            return _Seen(
                self.group.all_reduce(values, op),
                lambda: self._close(own, values["count"].view(-1)[0].double()),
            )
        if not self._names.issuperset(values):
            return self.group.all_reduce(values, op)
        self._own = self._own + _square(values.values())
        return _Seen(
            self.group.all_reduce(values, op), lambda: self._add(values.values(), 1 / self.size)
        )

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        if not self._due(op):
            return self.group.reduce_scatter(values, op)
        self._own = self._own + _square(values.values())
        mine = [v[part] for v in values.values() for part in self.group.own(v)]
        return _Seen(self.group.reduce_scatter(values, op), lambda: self._add(mine, 1.0))

    def _due(self, op: Op) -> bool:
        return op == "sum" and self._round() % self._every == 0

    def _add(self, merged: Iterable[Tensor], fraction: float) -> None:
        self._merged = self._merged + fraction * _square(merged)

    def _close(self, own: Tensor, total: Tensor) -> None:
        """End a measured round. The count comes last: all gradients of the round have been seen."""
        zero = torch.zeros_like(own)
        row = [
            torch.where(own > 0, self._own / own.clamp(min=1), zero),
            self._merged / total.clamp(min=1),
            (own > 0).double(),
            zero + 1 / self.size,
            total / self.size,
        ]
        self._sums += torch.stack(row)
        self._own, self._merged = zero, zero

    # -- the reading --

    def take(self) -> Tensor:
        """This rank's part of the sums since the last call, to be summed over ranks for `read`."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken

    def read(self, sums: Sequence[float]) -> float:
        """The noise scale in samples, averaged over all readings so far; nan while unknown."""
        own, merged, ranks, rounds, samples = sums
        if rounds > 0.5 and ranks - rounds > 0.5:
            trace = (own - merged) / (ranks - rounds)
            square = (merged - rounds * trace) / samples
            if not math.isfinite(trace):  # an overflow, which the loss scaler skips
                return self.read((0.0,) * 5)
            first = math.isnan(self._trace)
            self._trace = trace if first else KEEP * self._trace + (1 - KEEP) * trace
            self._square = square if first else KEEP * self._square + (1 - KEEP) * square
        # early on, the estimate of |G|^2 may be negative
        return self._trace / self._square if self._square > 0 else math.nan


class _Seen:
    def __init__(self, work: Work, then: Callable[[], None]):
        self._work, self._then = work, then

    def wait(self) -> None:
        self._work.wait()
        then, self._then = self._then, lambda: None
        then()


def _square(values: Iterable[Tensor]) -> Tensor | float:
    return sum((torch.linalg.vector_norm(v).double().square() for v in values), 0.0)
