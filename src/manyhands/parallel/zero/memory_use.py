"""What a rank of a spread replica really holds, counted on its tensors: for tests, and for the forecast to be compared with."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

from manyhands.parallel.zero.sharded_parameters import ShardedParameters


def held_bytes(flat: ShardedParameters, optimizer: Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer state that this rank has now, each memory once; of what is common its share."""
    seen: dict[int, int] = {}
    for tensor in held(flat, optimizer):
        if nbytes := tensor.untyped_storage().nbytes():
            seen[tensor.untyped_storage().data_ptr()] = nbytes
    shared = (
        {s.full.untyped_storage().data_ptr() for s in flat.spans} if flat.common_bytes else set()
    )
    return sum(n // flat.group.size if at in shared else n for at, n in seen.items())


class Peak:
    """The most that `held_bytes` has been while training; it looks whenever memory comes."""

    def __init__(self, flat: ShardedParameters, optimizer: Optimizer):
        self._flat, self._optimizer, self.nbytes = flat, optimizer, 0
        flat.watch = self.look

    def look(self) -> None:
        self.nbytes = max(self.nbytes, held_bytes(self._flat, self._optimizer))


def held(flat: ShardedParameters, optimizer: Optimizer) -> Iterator[Tensor]:
    """All of it; looking changes nothing."""
    for p in flat.module.parameters():
        yield p.data
        if p.grad is not None:
            yield p.grad
    for s in (*flat.spans, *flat.frozen):
        yield from (s.full, s.value, s.grad)
        if s.buffer is not None:
            yield s.buffer
    for free in flat.pool.values():
        yield from free
    for kept in optimizer.state.values():
        yield from (v for v in kept.values() if isinstance(v, Tensor))
