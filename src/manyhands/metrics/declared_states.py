"""Declared states of an accumulating metric: what it holds, and how ranks merge it.

    sum, max, min    of tensors or numbers
    mean             weighted by the samples that each rank has seen
    cat              lists of tensors, one after the other, in the order of ranks
    rows             as cat, one row or several for each sample, in the order of the test data

Objects say it by an attribute `reductions`, {"hits": "sum"}. Those of torchmetrics have declared it
by `add_state`; they may also reduce by a function, or not at all, which then gets, or keeps, the
values of all ranks. Nothing of torchmetrics is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.errors import TaskError

REDUCTIONS = ("sum", "mean", "max", "min", "cat", "rows")
OF_TORCHMETRICS = {f"dim_zero_{name}": name for name in REDUCTIONS}

Reduction = str | Callable[[Any], Any] | None


@dataclass(frozen=True)
class RankValues:
    """What one rank holds of a state, and the samples it has seen."""

    tensors: list[Tensor]
    samples: int


@dataclass
class DeclaredState:
    """One state: attribute `name` of `owner`."""

    owner: Any
    name: str
    reduction: Reduction
    default: Tensor | None = None  # before any update; None: nothing that counts

    def read(self) -> list[Tensor]:
        value = getattr(self.owner, self.name)
        if not isinstance(value, list | tuple):
            return [self._tensor(value)]
        found = [self._tensor(v) for v in value]
        if self.reduction in ("cat", "rows") and len(found) > 1:
            return [torch.cat([torch.atleast_1d(t) for t in found])]
        return found

    def merge(self, found: Sequence[RankValues], interleaved: bool) -> None:
        """Take the value of all ranks, given that of each rank that has seen samples, in order."""
        value = getattr(self.owner, self.name)
        if isinstance(value, list | tuple):
            setattr(self.owner, self.name, self._lists(found, interleaved))
            return
        merged = self._merged([v.tensors[0] for v in found], [v.samples for v in found])
        if isinstance(value, Tensor):
            merged = merged.to(value.device)
        elif isinstance(value, np.ndarray):
            merged = merged.numpy()
        else:
            merged = type(value)(merged.item())
        setattr(self.owner, self.name, merged)

    def _lists(self, found: Sequence[RankValues], interleaved: bool) -> Any:
        every = [t for values in found for t in values.tensors]
        if self.reduction is None or not every:
            return every
        if callable(self.reduction):
            return every if len(found) == 1 else self.reduction(every)
        if self.reduction not in ("cat", "rows"):
            raise TaskError(
                f"{self._whose()} is a list, which {self.reduction!r} cannot merge; declare 'cat'"
            )
        shapes = {tuple(t.shape[1:]) for t in every if t.numel()}
        if len(shapes) > 1:
            raise TaskError(
                f"{self._whose()} has rows of the shapes {sorted(shapes)} on different ranks, "
                "which cannot be put together; pad them all to one length"
            )
        rows = torch.cat([torch.atleast_1d(t) for t in every])
        if self.reduction == "rows" and interleaved:
            rows = rows[self._order(found)]
        return [rows]

    def _order(self, found: Sequence[RankValues]) -> Tensor:
        """Rank r of n has read samples r, r + n, r + 2n, ... of a stream."""
        numbers = []
        for values in found:
            rows = sum(len(t) for t in values.tensors)
            if rows % values.samples:
                raise TaskError(
                    f"{self._whose()} has {rows} rows for {values.samples} samples of a stream, "
                    "whose order cannot be known then; give one row for each sample"
                )
            numbers.append(torch.arange(values.samples).repeat_interleave(rows // values.samples))
        return torch.cat(numbers).sort(stable=True).indices

    def _merged(self, values: list[Tensor], samples: list[int]) -> Any:
        if self.reduction in ("cat", "rows"):
            return torch.cat([torch.atleast_1d(v) for v in values])
        if self.reduction == "sum":
            rest = None if self.default is None else self.default.to(values[0])
            if rest is None or not bool(rest.any()):
                return sum(values[1:], start=values[0])
            return sum((v - rest for v in values[1:]), start=values[0])
        if self.reduction == "mean":
            weighted = [v.double() * n for v, n in zip(values, samples, strict=True)]
            mean = torch.stack(weighted).sum(0) / sum(samples)
            return mean.to(values[0].dtype if values[0].is_floating_point() else torch.float32)
        if self.reduction in ("max", "min"):
            stacked = torch.stack(values)
            return stacked.amax(0) if self.reduction == "max" else stacked.amin(0)
        if len(values) == 1:  # as with one process, where nothing is merged
            return values[0]
        stacked = torch.stack(values)
        return self.reduction(stacked) if callable(self.reduction) else stacked

    def _tensor(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach()
        if isinstance(value, np.ndarray | np.generic):
            return torch.as_tensor(value)
        if isinstance(value, int | float):
            return torch.tensor(
                value, dtype=torch.int64 if isinstance(value, int) else torch.double
            )
        raise TaskError(
            f"{self._whose()} is a {type(value).__name__}, but ranks send each other tensors, "
            "numbers and lists of them only; keep that"
        )

    def _whose(self) -> str:
        return f"the state {self.name!r} of {type(self.owner).__name__}"


def declared_states(metric: Any) -> list[DeclaredState] | None:
    """All states of a metric and of the metrics in it, in an order that all ranks share; None: it
    declares none."""
    parts = metric.modules() if isinstance(metric, nn.Module) else [metric]
    found: list[DeclaredState] = []
    declares = False
    for part in parts:
        reductions, defaults = _reductions(part), getattr(part, "_defaults", {})
        if reductions is None:
            continue
        declares = True
        for name, reduction in reductions.items():
            default = defaults.get(name) if isinstance(defaults, Mapping) else None
            kept = default if isinstance(default, Tensor) else None
            found.append(DeclaredState(part, name, reduction, kept))
    return found if declares else None


def _reductions(part: Any) -> Mapping[str, Reduction] | None:
    own = getattr(part, "reductions", None)
    if isinstance(own, Mapping):
        for name, reduction in own.items():
            if reduction not in REDUCTIONS:
                raise TaskError(
                    f"{type(part).__name__}.reductions has {name!r}: {reduction!r}, but one of "
                    f"{', '.join(REDUCTIONS)} is needed"
                )
        return own
    added = getattr(part, "_reductions", None)
    if not isinstance(added, Mapping):
        return None
    return {name: OF_TORCHMETRICS.get(_name(f), f) for name, f in added.items()}


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", ""))
