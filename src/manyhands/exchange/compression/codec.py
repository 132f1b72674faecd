"""Codec: how one vector is compressed, and the state it keeps from one exchange to the next.

A reduction is a generator: it yields each exchange that it has started and continues when that
one is over. So straight code states the order, and the group decides the time: the first exchange
starts in `all_reduce`, while backward still runs, the rest in `wait`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from manyhands.core import (
    Cargo,
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.errors import CheckpointError

EVERYTHING: frozenset[Cargo] = frozenset({"gradients", "updates", "parameters"})
# what is left out of these can follow later
DIFFERENCES: frozenset[Cargo] = frozenset({"gradients", "updates"})

Shapes = Sequence[tuple[slice, torch.Size]]  # the parameters in a flat vector


class Codec(Protocol):
    """A compression: a frozen dataclass whose fields are its options. All ranks end `reduce` with
    the same bits."""

    carries: ClassVar[frozenset[Cargo]]
    point_to_point: ClassVar[bool]  # can what one rank sends be read without the others?

    def reduce(self, x: Tensor, op: Op, group: Group, memory: Memory) -> Iterator[Work]:
        """Sum or average the flat vector `x` in place over the ranks of `group`."""
        ...

    def encode(self, x: Tensor, memory: Memory) -> Tensor: ...
    def decode(self, packed: Tensor, into: Tensor, memory: Memory) -> None:
        """Write what a peer's `encode` of the same step returned into the flat vector `into`."""
        ...


class Memory:
    """State of a codec for one tensor: `keep` is saved in checkpoints, `scratch` is not."""

    def __init__(
        self, name: str, state: Tensors, rank: int, sends: Cargo, shapes: Shapes | None = None
    ):
        self.name, self.rank, self.sends, self.shapes = name, rank, sends, shapes
        self._state = state
        self._checked: set[str] = set()
        self._scratch: Tensors = {}

    @property
    def latest(self) -> int:
        """The number of the step that `count` counted last."""
        return int(self._state[f"steps/{self.name}"]) - 1

    def count(self) -> int:
        """Count a step and return its number, from 0."""
        steps = self.keep("steps", 1, torch.int64, torch.device("cpu"))
        steps += 1
        return self.latest

    def seed(self, *about: object) -> int:
        """A seed from the tensor's name and `about`: equal on all ranks where these are equal."""
        return zlib.crc32("/".join(map(str, (self.name, *about))).encode())

    def error(self, x: Tensor) -> Tensor:
        """The residual of `x`: at least float32, or what is fed back would be rounded away."""
        return self.keep("error", x.numel(), torch.promote_types(x.dtype, torch.float32), x.device)

    def has(self, kind: str) -> bool:
        return f"{kind}/{self.name}" in self._state

    def keep(
        self,
        kind: str,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        may_vanish: bool = False,
    ) -> Tensor:
        """A vector that outlives the step, zero at first. `may_vanish`: one of another length,
        from a run with another number of ranks, is replaced by zeros."""
        key = f"{kind}/{self.name}"
        if key in self._checked:
            return self._state[key]
        kept = self._state.get(key)
        if kept is not None and kept.numel() != numel:
            if not may_vanish:
                raise CheckpointError(
                    f"the compression's {kind!r} of {self.name!r} has {kept.numel()} elements, but "
                    f"{numel} are needed here: the tensor was cut otherwise when it was saved; set "
                    "bucket_mb and compress as they were then, or resume with compress=none"
                )
            kept = None
        self._state[key] = (
            torch.zeros(numel, dtype=dtype, device=device)
            if kept is None
            else kept.to(device, dtype)
        )
        self._checked.add(key)
        return self._state[key]

    def scratch(self, kind: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A vector to write into, the same memory every time."""
        found = self._scratch.get(kind)
        if found is None or found.numel() != numel:
            found = self._scratch[kind] = torch.empty(numel, dtype=dtype, device=device)
        return found


def drop_nonfinite(kept: Tensor, witness: Tensor) -> None:
    """Replace NaN and infinity in `kept` by 0.

    A NaN is sent, where it is noticed, but not kept: a step that a loss scaler skips must leave
    nothing behind. `witness` is small and not finite if
    anything in `kept` is not; on a GPU it is not looked at, because that would wait for the
    device.
    """
    if kept.device.type != "cpu" or not bool(torch.isfinite(witness).all()):
        kept.nan_to_num_(0.0, 0.0, 0.0)
