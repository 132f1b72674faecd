"""All-reduce algorithms over point-to-point messages, and the choice between them.

To add one: write `algorithms/NAME.py` with a function of one rank's `Vector`, add it to
`ALGORITHMS` and its cost to `cost`, and `algorithm=NAME` works in a plan.

    ALGORITHMS        name -> the algorithm, a function of one rank's `Vector` (vector.py)
    AlgorithmGroup    a group whose all_reduce runs one of them over the transfers of another group
    cost, choose      seconds that each should take (cost.py); `auto` measures the network and takes
                      the cheapest for each message
    steps             what every rank holds after every step, printed

An all-reduce is over when it returns, so that all ranks do the same in the same order and no thread
is needed. Its messages keep the order of all transfers between a pair of ranks: both ranks must
make their own transfers before it, or both after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from manyhands.core import (
    Finished,
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.errors import PlanError
from manyhands.exchange.algorithms.binary_blocks import binary_blocks
from manyhands.exchange.algorithms.butterfly import butterfly
from manyhands.exchange.algorithms.cost import (
    LinkCost,
    choose,
    cost,
    measure,
)
from manyhands.exchange.algorithms.double_tree import double_tree
from manyhands.exchange.algorithms.halving_doubling import halving_doubling
from manyhands.exchange.algorithms.hierarchical import group_of, hierarchical
from manyhands.exchange.algorithms.ring import ring
from manyhands.exchange.algorithms.star import star
from manyhands.exchange.algorithms.tree import tree
from manyhands.exchange.algorithms.vector import Scratch, Vector, Watch
from manyhands.exchange.wrapper import GroupWrapper

__all__ = [
    "ALGORITHMS",
    "NAMES",
    "AlgorithmGroup",
    "LinkCost",
    "check",
    "choose",
    "cost",
    "measure",
    "wrap",
]

Algorithm = Callable[..., None]

ALGORITHMS: dict[str, Algorithm] = {
    "star": star,
    "tree": tree,
    "double_tree": double_tree,
    "butterfly": butterfly,
    "halving_doubling": halving_doubling,
    "ring": ring,
    "binary_blocks": binary_blocks,
    "hierarchical": hierarchical,
}
NAMES = (*ALGORITHMS, "auto")
OPTIONS = {"double_tree": ("latency_bytes",), "hierarchical": ("group_size",)}
# dtypes that torch does not sum, or not as numbers
WIDE = {
    torch.bool: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


def check(name: str, size: int, **options: Any) -> None:
    """Raise PlanError where these words do not fit each other or `size` ranks."""
    if name not in NAMES:
        raise PlanError(f"algorithm={name} is not known; known: {', '.join(NAMES)}")
    known = OPTIONS.get(name, ())
    if unknown := [o for o in options if o not in known]:
        raise PlanError(
            f"algorithm={name} has no option {unknown[0]}; it has {', '.join(known) or 'none'}"
        )
    if name == "hierarchical":
        group_of(size, options.get("group_size"))
    if not (latency := options.get("latency_bytes", 1)) > 0:
        raise PlanError(
            f"algorithm={name} with latency_bytes={latency}; "
            "give alpha/beta, the bytes sent in the time of one latency"
        )


def wrap(group: Group, name: str, **options: Any) -> AlgorithmGroup:
    """`group` with all-reduces by the algorithm `name`; `auto`: by the cheapest for each
    message."""
    return AlgorithmGroup(group, name, **options)


class AlgorithmGroup(GroupWrapper):
    """`watch` is called at every step of every rank of this group: for pictures and tests."""

    def __init__(self, group: Group, name: str, *, watch: Watch | None = None, **options: Any):
        check(name, group.size, **options)
        super().__init__(group)
        self.name = name
        self._options, self._watch, self._scratch = options, watch, Scratch()
        self._measured: LinkCost | None = None
        self._chosen: dict[int, partial[None]] = {}

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        if op not in get_args(Op):
            raise ValueError(f"all_reduce with op={op!r}; needed: one of {', '.join(get_args(Op))}")
        if self.size > 1:
            for flat in _packed(values):
                self._algorithm(flat)(
                    Vector(flat, self.group, op, scratch=self._scratch, watch=self._watch)
                )
                if op == "mean":
                    flat.div_(self.size) if flat.is_floating_point() else flat.floor_divide_(
                        self.size
                    )
        return Finished()

    def _algorithm(self, flat: Tensor) -> partial[None]:
        """The same on all ranks: they share name, size, length and the measured cost of
        messages."""
        if self.name != "auto":
            return partial(ALGORITHMS[self.name], **self._options)
        if flat.nbytes not in self._chosen:
            if self._measured is None:
                self._measured = measure(self.group, flat.device)
            name = choose(self.size, flat.nbytes, *self._measured)
            alpha, beta, _ = self._measured
            fitted = (
                {"latency_bytes": alpha / beta}
                if name == "double_tree" and alpha * beta > 0
                else {}
            )
            self._chosen[flat.nbytes] = partial(ALGORITHMS[name], **fitted)
        return self._chosen[flat.nbytes]


def _packed(values: Tensors) -> Iterator[Tensor]:
    """The values as one flat vector per dtype and device; what the caller did to a vector is copied
    back when it asks for the next."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for v in values.values():
        if v.numel():
            kinds.setdefault((WIDE.get(v.dtype, v.dtype), v.device), []).append(v.detach())
    for (dtype, _), tensors in kinds.items():
        if len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].dtype == dtype:
            yield tensors[0].view(-1)
            continue
        flat = torch.cat([t.reshape(-1).to(dtype) for t in tensors])
        yield flat
        for t, slice_ in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(slice_.view(t.shape))
