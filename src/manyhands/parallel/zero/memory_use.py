"""Memory use: the bytes that a rank of a sharded replica holds, counted on its tensors.

Tests compare it with the memory forecast.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

from manyhands.parallel.zero.sharded_parameters import ShardedParameters


def held_bytes(flat: ShardedParameters, optimizer: Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer state on this rank, each memory once; of common
    memory 1/n."""
    seen: dict[int, int] = {}
    for tensor in held(flat, optimizer):
        if nbytes := tensor.untyped_storage().nbytes():
            seen[tensor.untyped_storage().data_ptr()] = nbytes
    shared = (
        {s.full.untyped_storage().data_ptr() for s in flat.spans} if flat.common_bytes else set()
    )
    return sum(n // flat.group.size if at in shared else n for at, n in seen.items())


class Peak:
    """The maximum of `held_bytes` while training, measured whenever memory is at a local peak."""

    def __init__(self, flat: ShardedParameters, optimizer: Optimizer):
        self._flat, self._optimizer, self.nbytes = flat, optimizer, 0
        flat.watch = self.measure

    def measure(self) -> None:
        self.nbytes = max(self.nbytes, held_bytes(self._flat, self._optimizer))


def held(flat: ShardedParameters, optimizer: Optimizer) -> Iterator[Tensor]:
    """All tensors of parameters, gradients and optimizer state on this rank; reading them gathers
    nothing."""
    for p in flat.module.parameters():
        yield p.data
        if p.grad is not None:
            yield p.grad
    for s in (*flat.spans, *flat.frozen):
        yield from (s.full, s.value, s.grad)
        if s.buffer is not None:
            yield s.buffer
    for free in flat.reduce.pool.values():
        yield from free
    for kept in optimizer.state.values():
        yield from (v for v in kept.values() if isinstance(v, Tensor))
