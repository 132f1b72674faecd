"""Kept rounds: this rank's state at the last two boundaries that it has kept, in memory.

Ranks keep a boundary at the same rounds, which the status exchange of each such round has settled.
A rank that keeps boundary b(i+1) has seen that exchange complete, so every other rank has entered
it, and has kept b(i) before. Whoever holds {b(i), b(i+1)} therefore meets nobody who lacks b(i):
with two boundaries each, the ranks that are left always hold one in common.

The memory of the older boundary is written over, never that of the newer: a rank may die, or be
interrupted, in the middle of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.core import Tensors

MOST = 2

# membership epoch in which it was kept, and round: after a loss rounds are computed again, by other
# ranks, so that a round alone does not say which state it is
Boundary = tuple[int, int]
# last epoch in which a rank trained, its own boundaries and those of copies, by part of the model
Held = list[Any]


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
    """`active` is the last membership epoch in which this rank has trained; `part` which part of
    the model it held there. `copies` are a neighbour's states, of part `copied`."""

    states: dict[Boundary, KeptState] = field(default_factory=dict)
    active: int = 0
    part: int = 0
    copies: dict[Boundary, KeptState] = field(default_factory=dict)
    copied: int = 0

    def held(self) -> Held:
        own = {self.part: sorted(self.states)} if self.states else {}
        copies = {self.copied: sorted(self.copies)} if self.copies else {}
        return [self.active, _listed(own), _listed(copies)]

    def keep(self, boundary: Boundary, tensors: Tensors, meta: dict[str, Any]) -> KeptState:
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
        return self.states[boundary]

    def keep_copy(self, boundary: Boundary, part: int, state: KeptState) -> None:
        """The state of a neighbour, for the case that it dies and no other replica is left."""
        if part != self.copied:
            self.copies, self.copied = {}, part
        self.copies[boundary] = state
        while len(self.copies) > MOST:
            del self.copies[min(self.copies)]

    def go_on(self, epoch: int, boundary: Boundary, part: int, state: KeptState) -> None:
        """All ranks go on from this boundary: forget the others."""
        self.active, self.part, self.states = epoch, part, {boundary: state}
        self.copies = {b: s for b, s in self.copies.items() if b == boundary}

    def start_anew(self, epoch: int, part: int) -> None:
        self.active, self.part, self.states, self.copies = epoch, part, {}, {}


@dataclass(frozen=True)
class Choice:
    """The boundary that all ranks go on from. `sources`: for each rank without its state there,
    the rank that gives it; `copies`: those that give the copy of a neighbour's state."""

    boundary: Boundary
    sources: dict[int, int]
    copies: frozenset[int] = frozenset()


def choose(held: Sequence[Held], inner: int) -> Choice | None:
    """The newest boundary that all ranks hold which trained in the last epoch that any trained in,
    and at which every part of the model is there. `held`: by rank; `inner`: ranks of a replica.
    None: there is none, so that the run goes on from disk.

    Ranks that sat out may hold older boundaries, which are of no use. A rank without state copies
    one that has the same part: of a replica that is complete, since replicas may differ; else of
    any; else the copy that a neighbour kept."""
    own = [_of_part(h[1], r % inner) for r, h in enumerate(held)]
    trained = [h[0] for h, kept in zip(held, own, strict=True) if kept]
    if not trained:
        return None
    common = set.intersection(
        *(kept for h, kept in zip(held, own, strict=True) if kept and h[0] == max(trained))
    )
    for boundary in sorted(common, reverse=True):
        found = _sources(held, own, boundary, inner)
        if found is not None:
            return found
    return None


def _sources(
    held: Sequence[Held], own: list[set[Boundary]], boundary: Boundary, inner: int
) -> Choice | None:
    ranks = range(len(held))
    has = [boundary in kept for kept in own]
    complete = [r for r in range(len(held) // inner) if all(has[r * inner : (r + 1) * inner])]
    sources: dict[int, int] = {}
    copies: set[int] = set()
    for rank in (r for r in ranks if not has[r]):
        part = rank % inner
        alike = [r for r in ranks if has[r] and r % inner == part]
        copied = [r for r in ranks if boundary in _of_part(held[r][2], part)]
        if complete:
            sources[rank] = complete[0] * inner + part
        elif alike or copied:
            sources[rank] = (alike or copied)[0]
            copies |= set() if alike else {rank}
        else:
            return None
    return Choice(boundary, sources, frozenset(copies))


def _listed(by_part: dict[int, list[Boundary]]) -> list[Any]:
    return [[part, [list(b) for b in kept]] for part, kept in by_part.items()]


def _of_part(listed: Sequence[Any], part: int) -> set[Boundary]:
    return {(e, r) for p, kept in listed if p == part for e, r in kept}
