"""Compressed group: sends compressed vectors over the group it wraps.

    CompressedGroup(ObservedGroup(group), TopK(density=0.01))

    all_reduce    compresses floating-point vectors of `smallest` elements and more (sum, mean)
    swap          likewise, where one peer alone can decode; `values` become what peers decode
    transfer      likewise, where it has a name and the codec encodes values one by one
    reduce_scatter, all_gather    made of such transfers
    all others    as the wrapped group does them: a broadcast is exact

Ranks make the same calls in the same order, `wait` included: a wait advances every exchange that is
under way by one stage, the earliest first, until its own is over. So all ranks send the same
things in the same order without threads, and stage two of one vector travels while stage one of
the next is decoded. With one rank nothing is compressed, because nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from manyhands.core import (
    EXACT,
    Cargo,
    Finished,
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.exchange import reduce_scatter
from manyhands.exchange.compression.codec import Codec, Memory, Shapes
from manyhands.exchange.compression.quantised import Quantised
from manyhands.exchange.wrapper import GroupWrapper

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SMALLEST = 1024  # below, the message costs more than its bytes


class CompressedGroup(GroupWrapper):
    """`state` is what a checkpoint must save, by "<kind>/<tensor>", live; each rank has its own.
    `shapes` says which parameters are where in a vector, for codecs that compress matrices."""

    def __init__(
        self,
        group: Group,
        codec: Codec,
        sends: Cargo = "gradients",
        shapes: Mapping[str, Shapes] | None = None,
        smallest: int = SMALLEST,
    ):
        super().__init__(group)
        self.codec, self.sends = codec, sends
        self.state: Tensors = {}
        self._shapes, self._smallest = shapes or {}, smallest
        self._memories: dict[str, Memory] = {}
        self._under_way: list[_Exchange] = []

    def warm(self, like: Tensor) -> None:
        """Compile or load the kernels for values on `like`'s device: before training, not within
        its first step."""
        if not self.codec.point_to_point or self.size == 1 or like.dtype not in FLOATING:
            return
        some, aside = (
            torch.ones(SMALLEST, dtype=like.dtype, device=like.device),
            Memory("warm", {}, self.rank, self.sends),
        )
        self.codec.decode(self.codec.encode(some, aside), some, aside)

    def load_state(self, saved: Tensors) -> None:
        if self._memories:
            raise ValueError("load_state after the first exchange; call it before any exchange")
        self.state.update({k: v.detach().clone() for k, v in saved.items()})

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        encoded = [] if op == "max" else self._encoded(values)
        if not encoded:
            return self.group.all_reduce(values, op)
        exchanges = [self._begin(name, values[name], op) for name in encoded]
        rest = {k: v for k, v in values.items() if k not in encoded}
        return _Reduction(self, exchanges, self.group.all_reduce(rest, op) if rest else Finished())

    def own(self, tensor: Tensor) -> list[slice]:
        return [reduce_scatter.equal_part(tensor.numel(), self.rank, self.size)]

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return reduce_scatter.reduce_scatter(self, values, op)

    def all_gather(self, values: Tensors) -> Work:
        return reduce_scatter.all_gather(self, values)

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        encoded = self._encoded(values) if self.codec.point_to_point else []
        if not encoded:
            return self.group.swap(values, peers)
        memories = {k: self._memory(f"swap/{k}") for k in encoded}
        if not peers:
            # nothing is sent, so residuals stay; but the step counts, as on the other ranks
            for memory in memories.values():
                memory.count()
            return self.group.swap(values, peers)
        sent = {
            k: self.codec.encode(_flat(v), memories[k]) if k in memories else v
            for k, v in values.items()
        }
        got = self.group.swap(sent, peers)
        # all ranks merge the same: from here on this rank has what its peers decode
        for k, memory in memories.items():
            own = torch.empty_like(values[k], memory_format=torch.contiguous_format)
            self.codec.decode(sent[k], own.view(-1), memory)
            values[k].copy_(own)
        for theirs in got:
            for k, memory in memories.items():
                packed, theirs[k] = (
                    theirs[k],
                    torch.empty_like(values[k], memory_format=torch.contiguous_format),
                )
                self.codec.decode(packed, theirs[k].view(-1), memory)
        return got

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        both = {str(i): v for i, v in enumerate([*give.values(), *into.values()])}
        if (
            not name
            or name.startswith(EXACT)
            or not isinstance(self.codec, Quantised)
            or len(self._encoded(both)) < len(both)
        ):
            return self.group.transfer(give, into, name)
        memory, codec = self._memory(f"transfer/{name}"), self.codec
        encoded: dict[int, Tensor] = {}  # by address: what goes to several ranks is encoded once
        for v in give.values():
            if v.data_ptr() not in encoded:
                encoded[v.data_ptr()] = codec.encode(_flat(v), memory).clone()
        arriving = {
            r: torch.empty(codec.nbytes(v.numel()), dtype=torch.uint8, device=v.device)
            for r, v in into.items()
        }
        work = self.group.transfer(
            {r: encoded[v.data_ptr()] for r, v in give.items()}, arriving, name
        )

        def decode() -> None:
            for r, packed in arriving.items():
                codec.decode(packed, into[r].view(-1), memory)

        return _Arrival(work, decode)

    def _encoded(self, values: Tensors) -> list[str]:
        if self.size == 1:
            return []
        long = {
            k: v
            for k, v in values.items()
            if v.numel() >= max(1, self._smallest) and not k.startswith(EXACT)
        }
        return [k for k, v in long.items() if v.dtype in FLOATING]

    def _memory(self, name: str) -> Memory:
        if name not in self._memories:
            self._memories[name] = Memory(
                name, self.state, self.rank, self.sends, self._shapes.get(name)
            )
        return self._memories[name]

    def _begin(self, name: str, value: Tensor, op: Op) -> _Exchange:
        for earlier in self._under_way:
            if earlier.name == name:  # its memory is in use
                self._finish(earlier)
                break
        exchange = _Exchange(name, self._carry(name, value.detach(), op))
        self._under_way.append(exchange)
        return exchange

    def _carry(self, name: str, value: Tensor, op: Op) -> Iterator[Work]:
        flat = _flat(value)
        yield from self.codec.reduce(flat, op, self.group, self._memory(name))
        # padding between parameters: what the codec writes there must not be sent again
        for gap in _gaps(self._shapes.get(name, ()), flat.numel()):
            flat[gap] = 0
        if flat.data_ptr() != value.data_ptr():
            value.copy_(flat.view(value.shape))

    def _finish(self, last: _Exchange) -> None:
        while not last.done:
            for exchange in list(self._under_way):
                exchange.advance()
                if exchange.done:
                    self._under_way.remove(exchange)
                if last.done:
                    return


class _Exchange:
    """One vector's reduction, and the stage of it that is under way."""

    def __init__(self, name: str, stages: Iterator[Work]):
        self.name, self._stages = name, stages
        self._now: Work | None = next(stages, None)

    @property
    def done(self) -> bool:
        return self._now is None

    def advance(self) -> None:
        if self._now is not None:
            self._now.wait()
            self._now = next(self._stages, None)


class _Arrival:
    def __init__(self, work: Work, decode: Callable[[], None]):
        self._work, self._decode = work, decode

    def wait(self) -> None:
        self._work.wait()
        decode, self._decode = self._decode, lambda: None
        decode()


class _Reduction:
    def __init__(self, group: CompressedGroup, exchanges: list[_Exchange], rest: Work):
        self._group, self._exchanges, self._rest = group, exchanges, rest

    def wait(self) -> None:
        for exchange in self._exchanges:
            self._group._finish(exchange)
        self._rest.wait()


def _gaps(shapes: Shapes, numel: int) -> Iterator[slice]:
    """Where a flat vector holds no parameter: the padding between those in `shapes`."""
    at = 0
    for parameter, _ in sorted(shapes, key=lambda shape: shape[0].start):
        if at < parameter.start:
            yield slice(at, parameter.start)
        at = parameter.stop
    if shapes and at < numel:
        yield slice(at, numel)


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1)
