"""Kept rounds: this rank's state at the last two boundaries that it has kept, in memory.

Ranks keep a boundary at the same rounds, which the status exchange of each such round has settled.
A rank that keeps boundary b(i+1) has seen that exchange complete, so every other rank has entered
it, and has kept b(i) before. Whoever holds {b(i), b(i+1)} therefore meets nobody who lacks b(i):
with two boundaries each, the ranks that are left always hold one in common.

The memory of the older boundary is written over, never that of the newer: a rank may die, or be
interrupted, in the middle of a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.core import Tensors

MOST = 2


@dataclass
class KeptState:
    """A rank's state at the boundary after `round`: tensors by kind and name, and plain values."""

    round: int
    tensors: Tensors
    meta: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def of_kind(self, kind: str) -> Tensors:
        """Tensors of "model", "optimizer", "state", "codec" or "rng", without that prefix."""
        prefix = f"{kind}/"
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}


@dataclass
class KeptRounds:
    states: dict[int, KeptState] = field(default_factory=dict)

    def rounds(self) -> list[int]:
        return sorted(self.states)

    def keep(self, round: int, tensors: Tensors, meta: dict[str, Any]) -> None:
        """Copy `tensors`; the oldest boundary is forgotten."""
        old: Tensors = {}
        if len(self.states) == MOST:
            old = self.states.pop(min(self.states)).tensors
        copied: Tensors = {}
        with torch.no_grad():
            for name, value in tensors.items():
                there = old.pop(name, None)
                if there is None or (there.shape, there.dtype) != (value.shape, value.dtype):
                    there = torch.empty(value.shape, dtype=value.dtype)
                copied[name] = there.copy_(value)
        self.states[round] = KeptState(round, copied, meta)

    def only(self, round: int | None, state: KeptState | None = None) -> None:
        """Forget all other boundaries: the ranks go on from this one. `state`: of a peer."""
        if state is not None:
            self.states = {state.round: state}
        else:
            self.states = {r: s for r, s in self.states.items() if r == round}


def common_round(held: Iterable[list[int]]) -> int | None:
    """The newest boundary that all ranks hold which hold any; None: no rank holds any."""
    some = [set(rounds) for rounds in held if rounds]
    common = set.intersection(*some) if some else set()
    if some and not common:
        raise AssertionError(f"ranks have kept no boundary in common: {some}")
    return max(common, default=None)
