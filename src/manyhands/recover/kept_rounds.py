"""Kept rounds: this rank's state at the last two boundaries that it has kept, in memory.

Ranks keep a boundary at the same rounds, which the status exchange of each such round has settled.
A rank that keeps boundary b(i+1) has seen that exchange complete, so every other rank has entered
it, and has kept b(i) before. Whoever holds {b(i), b(i+1)} therefore meets nobody who lacks b(i):
with two boundaries each, the ranks that are left always hold one in common.

The memory of the older boundary is written over, never that of the newer: a rank may die, or be
interrupted, in the middle of a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.core import Tensors

MOST = 2

# membership epoch in which it was kept, and round: after a loss rounds are computed again, by other
# ranks, so that a round alone does not say which state it is
Boundary = tuple[int, int]
Held = tuple[int, Sequence[Sequence[int]]]  # last epoch in which a rank trained, its boundaries


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
    """`active` is the last membership epoch in which this rank has trained, `part` the part of a
    replica that it held then: its states are of no use to a rank that holds another."""

    states: dict[Boundary, KeptState] = field(default_factory=dict)
    active: int = 0
    part: int = 0

    def of_part(self, part: int) -> dict[Boundary, KeptState]:
        return self.states if part == self.part else {}

    def held(self, part: int = 0) -> Held:
        return self.active, sorted(self.of_part(part))

    def keep(self, boundary: Boundary, tensors: Tensors, meta: dict[str, Any]) -> None:
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
        self.states[boundary] = KeptState(boundary[1], copied, meta)

    def go_on(
        self, epoch: int, boundary: Boundary | None, state: KeptState | None, part: int = 0
    ) -> None:
        """All ranks go on from this boundary, or from none: forget the others."""
        self.active, self.part = epoch, part
        self.states = {} if boundary is None or state is None else {boundary: state}


def common_boundary(held: Iterable[Held]) -> Boundary | None:
    """The newest boundary that all ranks hold which trained in the last epoch that any trained in;
    None: no rank holds any. Ranks that sat out may hold older ones, which are of no use now."""
    some = [(active, {(e, r) for e, r in kept}) for active, kept in held if kept]
    if not some:
        return None
    last = max(active for active, _ in some)
    common = set.intersection(*(kept for active, kept in some if active == last))
    if not common:
        raise AssertionError(f"ranks have kept no boundary in common: {some}")
    return max(common)
