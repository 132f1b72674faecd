"""Which parameters of a module travel together, and where each lies in what travels.

    span     parameters one after the other in one vector; of n ranks each owns 1/n of it, in one piece
    bucket   a span of so many bytes, cut from the back: the order in which backward makes gradients
    unit     the spans of one block of the model, which are there while the block runs

Blocks are what people write in a ModuleList or Sequential. What belongs to no block, or to several (tied weights), is the root's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

ALIGN_BYTES = 64
# what autocast computes in the short type whatever the weight's own: to gather it in that type changes no bit
MATRIX_WORK = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class SpanEntry:
    """One parameter's place in a span."""

    index: int  # among those that train; -1: it is frozen
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    stop: int


@dataclass
class Span:
    key: str
    dtype: torch.dtype  # in which it is kept, summed and updated
    wire: torch.dtype  # in which it is gathered and computed with
    places: list[SpanEntry]
    length: int
    own: slice
    value: Tensor = field(default_factory=lambda: torch.empty(0))  # this rank's part
    grad: Tensor = field(default_factory=lambda: torch.empty(0))
    full: Tensor = field(default_factory=lambda: torch.empty(0))  # all of it, while that is here
    buffer: Tensor | None = None  # gradients on their way into the sum over ranks
    lent: Tensor | None = None  # what the buffer is the beginning of
    filled: set[int] = field(default_factory=set)  # whose gradient is in there
    seen: set[int] = field(default_factory=set)  # who has had a gradient in this backward pass
    sent: bool = False  # in this backward pass
    summed: bool = False  # `grad` has something of this step

    @property
    def trains(self) -> bool:
        return self.places[0].index >= 0

    def run(self, place: SpanEntry) -> tuple[int, int]:
        """Which elements of the parameter, row by row, this rank owns: from, to; the same number twice: none."""
        first = min(max(self.own.start, place.start), place.stop)
        return first - place.start, max(first, min(self.own.stop, place.stop)) - place.start

    def gaps(self) -> Iterator[slice]:
        """Padding, which stays zero."""
        ends = [0, *(p.stop for p in self.places)]
        starts = [*(p.start for p in self.places), self.length]
        return (slice(a, b) for a, b in zip(ends, starts, strict=True) if a < b)

    def view(self, vector: Tensor, place: SpanEntry) -> Tensor:
        return vector[place.start : place.stop].view(place.shape)


@dataclass(eq=False)
class Unit:
    name: str
    module: nn.Module
    spans: list[Span]
    here: bool = False
    uses: int = 0  # forward passes whose backward pass is still to come
    in_backward: bool = False


Named = tuple[int, str, nn.Parameter]  # index among those that train, name, parameter


def span(key: str, named: list[Named], wire: torch.dtype, rank: int, size: int) -> Span:
    dtype = named[0][2].dtype
    align = max(1, ALIGN_BYTES // dtype.itemsize)
    places, end = [], 0
    for index, name, p in named:
        places.append(SpanEntry(index, name, p, p.shape, end, end + p.numel()))
        end += -(-p.numel() // align) * align
    length = -(-end // (align * size)) * align * size
    return Span(
        key, dtype, wire, places, length, slice(length * rank // size, length * (rank + 1) // size)
    )


def buckets(named: list[Named], bucket_bytes: int, rank: int, size: int) -> list[Span]:
    found: list[Span] = []
    for dtype in dict.fromkeys(p.dtype for _, _, p in named):
        key, nbytes = str(dtype).removeprefix("torch."), 0
        waiting: list[Named] = []
        for one in reversed([n for n in named if n[2].dtype == dtype]):
            waiting.insert(0, one)
            nbytes += one[2].nbytes
            if nbytes >= bucket_bytes:
                found.append(span(f"{key}[{len(found)}]", waiting, dtype, rank, size))
                waiting, nbytes = [], 0
        if waiting:
            found.append(span(f"{key}[{len(found)}]", waiting, dtype, rank, size))
    return found


def blocks(module: nn.Module, least_bytes: int) -> list[tuple[str, nn.Module]]:
    """The modules that are units: children of lists, and what else at the top is at least `least_bytes` large."""
    found: list[tuple[str, nn.Module]] = []

    def look(prefix: str, parent: nn.Module) -> None:
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            if not any(True for _ in child.parameters()):
                continue
            listed = isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)
            holds_list = any(isinstance(m, nn.ModuleList | nn.Sequential) for m in child.modules())
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or (holds_list and not listed):
                look(f"{path}.", child)
            elif listed or sum(p.nbytes for p in child.parameters()) >= least_bytes:
                found.append((path, child))

    look("", module)
    return found


def units(
    module: nn.Module,
    indices: dict[int, int],
    short: torch.dtype | None,
    least_bytes: int,
    rank: int,
    size: int,
) -> list[Unit]:
    """The root first. `indices` numbers the parameters that train, by identity; frozen ones travel in spans of their own."""
    names = {id(p): n for n, p in module.named_parameters()}
    named = dict(module.named_parameters())
    claimed: dict[int, list[int]] = {}  # parameter -> the blocks that have it
    chosen = blocks(module, least_bytes)
    for b, (_, block) in enumerate(chosen):
        for p in block.parameters():
            claimed.setdefault(id(p), []).append(b)
    inside = {id(block) for _, block in chosen}
    outside = {
        id(p) for m in _outside(module, inside) for p in m._parameters.values() if p is not None
    }
    owner = {i: b[0] for i, b in claimed.items() if len(b) == 1 and i not in outside}
    in_matrices = _in_matrices(module) if short is not None else set()
    found = []
    for b, (name, block) in [(-1, ("", module)), *enumerate(chosen)]:
        mine = [p for p in named.values() if owner.get(id(p), -1) == b]
        kinds: dict[tuple[bool, torch.dtype, torch.dtype], list[Named]] = {}
        for p in mine:
            wire = (
                short
                if short is not None and id(p) in in_matrices and p.dtype == torch.float32
                else p.dtype
            )
            kinds.setdefault((p.requires_grad, p.dtype, wire), []).append(
                (indices.get(id(p), -1), names[id(p)], p)
            )
        spans = [
            span(f"{name}:{i}", some, kind[2], rank, size)
            for i, (kind, some) in enumerate(kinds.items())
        ]
        if spans or b < 0:
            found.append(Unit(name, block, spans))
    return found


def _outside(module: nn.Module, inside: set[int]) -> Iterator[nn.Module]:
    if id(module) in inside:
        return
    yield module
    for child in module.children():
        yield from _outside(child, inside)


def _in_matrices(module: nn.Module) -> set[int]:
    """Parameters that only layers of matrix work have."""
    yes = {
        id(p)
        for m in module.modules()
        if isinstance(m, MATRIX_WORK)
        for p in m._parameters.values()
        if p is not None
    }
    no = {
        id(p)
        for m in module.modules()
        if not isinstance(m, MATRIX_WORK)
        for p in m._parameters.values()
        if p is not None
    }
    return yes - no
