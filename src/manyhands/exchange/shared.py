"""Shared-memory group: exchange between processes of one CPU host through memory that all map.

A tensor made by `allocate` is at the same offset in every rank's segment, so an all-reduce of it
copies nothing into buffers:

    post      rank r announces "my values for call t are final"
    reduce    when all have posted, r sums its part over all ranks' memory          (reduce-scatter)
    push      and writes the sum into every rank's memory                           (all-gather)
    done      r announces it; when all are done, the call is complete everywhere

Every element is summed by one owner and copied, so all ranks hold the same bits. `reduce_scatter`
leaves the push out and `all_gather` is only the push; common memory needs no push at all. In a
broadcast every rank copies from the source's memory. A barrier is a call without tensors.

There is no helper thread: a rank that posts call t also reduces the earlier calls that have become
complete, so exchange overlaps with backward and no second thread competes for the core. Tensors
from private memory travel through a small staging buffer, messages between two ranks through a
mailbox.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core import Finished, Group, Op, Tensors, Work
from manyhands.errors import Deadlock
from manyhands.exchange.interruption import Interruption
from manyhands.exchange.mailbox import Mailboxes, Parcel
from manyhands.exchange.peer_wait import Fence, PeerWait
from manyhands.exchange.shared_vectors import Blocks, SharedVectors
from manyhands.exchange.solo import check_source, to_oneself
from manyhands.exchange.wrapper import unwrapped

STAGING_BYTES = 4 << 20  # of a rank, at most
HOST_STAGING_BYTES = 32 << 20  # of all ranks of a host, however many they are
SIGNATURES = 4096  # calls of one rank that may be under way before a mismatch could go unnoticed
LINE = 8  # int64 words between two ranks' counters: one cache line each

Allocate = Callable[[int, torch.dtype], Tensor]
Between = Callable[[Tensor, Op], None]
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"]


class SharedGroup(Group):
    """`between`, if given, runs on each owner's part after the sum over this host and before the
    push.

    With a collective across hosts as `between`, this is the hierarchical all-reduce; `owners` is
    then how many ranks of each host own parts, and `divisor` the number of all ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        *,
        timeout_s: float = 600.0,
        between: Between | None = None,
        owners: int | None = None,
        divisor: int | None = None,
        interruption: Interruption | None = None,
    ):
        self.rank, self.size = rank, size
        self._between, self._divisor = between, divisor or size
        self._vectors = SharedVectors(
            rank, size, store, timeout_s, owners or size, between is not None, interruption
        )
        self._queue: deque[_Call] = deque()
        self._calls = self._transfers = 0
        words = self._vectors.map(
            8 * (2 * size * LINE + size + 5 * size * size + size * SIGNATURES), made_by=0
        )[0]
        control = np.frombuffer(words, dtype=np.int64)
        self._posted, self._done = (
            control[i * size * LINE : (i + 1) * size * LINE : LINE] for i in range(2)
        )
        rest = control[2 * size * LINE :]
        self._pids = rest[:size]
        self._sent, self._read = (
            rest[size + i * size**2 : size + (i + 1) * size**2].reshape(size, size)
            for i in range(2)
        )
        boxes = rest[size + 2 * size**2 : size + 5 * size**2]
        self._signatures = rest[size + 5 * size**2 :].reshape(size, SIGNATURES)
        self._fence = Fence()
        self._mail = Mailboxes(rank, size, boxes, store, self._fence)
        progress = self._mail.progress
        self._wait = PeerWait(rank, self._pids, timeout_s, self._fence, progress, interruption)
        self._pids[rank] = os.getpid()
        self._vectors.gather("")  # every pid is known before any rank waits for another
        self._staging = self.allocate(min(STAGING_BYTES, HOST_STAGING_BYTES // size), torch.uint8)

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        common: bool = False,
        even: bool = False,
    ) -> Tensor:
        """A zeroed vector in shared memory: a copy per rank, or one that is `common` to all.

        `even`: it and each slice of it has one equal, contiguous part for every rank.
        """
        if device is not None and device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._vectors.allocate(numel, dtype, common, even)

    def own(self, tensor: Tensor) -> list[slice]:
        return self._vectors.own(tensor)

    # -- exchange --

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        if self.size == 1 and self._between is None:
            return Finished()
        placed, foreign = self._sorted(values)
        work: Work = self._post(placed, op) if placed else Finished()
        for v in foreign:
            self._through_staging(v, lambda staged: self._post([staged], op))
        return work

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        """For vectors from `allocate`."""
        return self._post(list(values.values()), op, "reduce_scatter")

    def all_gather(self, values: Tensors) -> Work:
        """For vectors from `allocate`."""
        return self._post(list(values.values()), "sum", "all_gather")

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        check_source(self, source)
        if self.size == 1:
            return Finished()

        def post(tensors: list[Tensor]) -> _Call:
            return self._post(tensors, "sum", "broadcast", source)

        placed, foreign = self._sorted(values)
        work: Work = post(placed) if placed else Finished()
        for v in foreign:
            self._through_staging(v, lambda staged: post([staged]))
        return work

    def barrier(self) -> None:
        if self.size > 1:
            self._post([], "sum", "barrier").wait()

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        got = [{k: torch.empty(v.shape, dtype=v.dtype) for k, v in values.items()} for _ in peers]
        staging, step = self._vectors.segments[0].views, self._staging.numel()
        for k, v in values.items():
            flat = _bytes(v)
            sinks = [(p, _bytes(g[k])) for p, g in zip(peers, got, strict=True)]
            for start in range(0, flat.numel(), step):
                chunk = flat[start : start + step]
                self._staging[: chunk.numel()].copy_(chunk)
                self._fence()
                for p in peers:
                    self._sent[self.rank, p] += 1
                for p, sink in sinks:
                    due = self._read[self.rank, p] + 1
                    self._await(self._sent, p, due)
                    sink[start : start + chunk.numel()].copy_(staging[p][: chunk.numel()])
                    self._fence()
                    self._read[self.rank, p] = due
                for p in peers:  # the staging buffer is free again when all have read it
                    due = self._sent[self.rank, p]
                    self._await(self._read, p, due)
        return got

    def _await(self, counters: np.ndarray, peer: int, due: int) -> None:
        self._wait(lambda: bool(counters[peer, self.rank] >= due), lambda: [peer], "swap")

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        to_oneself(self, give, into)
        parcels = [self._mail.send(r, v) for r, v in give.items() if r != self.rank and v.numel()]
        parcels += [
            self._mail.receive(r, v) for r, v in into.items() if r != self.rank and v.numel()
        ]
        self._mail.progress()
        self._transfers += 1
        return _Transfer(self, self._transfers - 1, parcels)

    def close(self) -> None:
        """Leave: a rank that waits for this one raises at once, not when this process ends."""
        self._queue.clear()
        self._mail.close()
        self._fence()
        self._pids[self.rank] = 0

    # -- the engine --

    def _sorted(self, values: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """The non-empty tensors in memory from `allocate`, and those from elsewhere."""
        placed: list[Tensor] = []
        foreign: list[Tensor] = []
        for v in values.values():
            if v.numel():
                here = v.is_contiguous() and self._vectors.find(v) is not None
                (placed if here else foreign).append(v)
        return placed, foreign

    def _post(
        self, tensors: list[Tensor], op: Op, kind: Kind = "all_reduce", source: int = 0
    ) -> _Call:
        reduces = kind in ("all_reduce", "reduce_scatter")
        if reduces and any([self._vectors.segment(t).common for t in tensors]):
            raise ValueError(
                "memory that is common to all ranks has one value: there is nothing to reduce"
            )
        call = _Call(self, self._calls, tensors, op, kind, source)
        self._calls += 1
        self._queue.append(call)
        self._signatures[self.rank, call.number % SIGNATURES] = call.signature
        self._fence()
        self._posted[self.rank] = self._calls
        self._progress()
        return call

    def _progress(self) -> None:
        while self._queue and self._posted.min() > self._queue[0].number:
            self._fence()  # nothing of what the flags announce is read before them
            call = self._queue.popleft()
            self._compare(call)
            for tensor in call.tensors:
                if call.kind == "broadcast":
                    self._vectors.read_from(call.source, tensor)
                else:
                    for blocks in self._vectors.blocks(tensor):
                        self._do(call, blocks)
            self._fence()
            self._done[self.rank] = call.number + 1

    def _compare(self, call: _Call) -> None:
        """Refuse a call that is another one on some rank, before any byte of it is mixed up."""
        signatures = self._signatures[:, call.number % SIGNATURES]
        if (others := np.flatnonzero(signatures != call.signature)).size:
            raise Deadlock(
                f"call #{call.number} is {call} on rank {self.rank}, but another one on ranks "
                f"{others.tolist()}; all ranks must exchange the same tensors in the same order: "
                "look for a branch that depends on the rank or on its data"
            )

    def _do(self, call: _Call, blocks: Blocks) -> None:
        """One row of blocks that this rank owns: sum it over ranks, then give it to all, as
        asked."""
        if call.kind != "all_gather":
            for mine, *others in blocks:
                for other in others:
                    if call.op == "max":
                        torch.maximum(mine, other, out=mine)
                    else:
                        mine.add_(other)
                if self._between is None:
                    self._divide(mine, call.op)
                    if call.kind == "all_reduce":
                        _push(mine, others)
            if self._between is None:
                return
            # blocks of one row are neighbours in memory: cross hosts once a row, not once a block
            first, last = blocks[0][0], blocks[-1][0]
            length = (last.data_ptr() - first.data_ptr()) // first.element_size() + last.numel()
            whole = torch.as_strided(first, (length,), (1,))
            self._between(whole, call.op)
            self._divide(whole, call.op)
        if call.kind != "reduce_scatter":
            for mine, *others in blocks:
                _push(mine, others)

    def _divide(self, mine: Tensor, op: Op) -> None:
        if op == "mean":
            mine.div_(self._divisor) if mine.is_floating_point() else mine.floor_divide_(
                self._divisor
            )

    def _finish(self, call: _Call) -> None:
        # common memory is complete for all ranks as soon as its owners have posted the call
        common = call.kind == "all_gather" and all(
            s.common for s in map(self._vectors.segment, call.tensors)
        )
        there = self._posted if common else self._done
        if there.min() > call.number:
            return

        def complete() -> bool:
            self._progress()
            return bool(there.min() > call.number)

        def absent() -> list[int]:
            return [r for r in range(self.size) if there[r] <= call.number and r != self.rank]

        self._wait(complete, absent, f"{call.kind} #{call.number}")

    def _through_staging(self, tensor: Tensor, post: Callable[[Tensor], _Call]) -> None:
        flat = tensor.detach().contiguous().view(-1)
        step = self._staging.numel() // 64 * 64 // tensor.element_size()
        for start in range(0, flat.numel(), step):
            chunk = flat[start : start + step]
            staged = self._staging[: chunk.nbytes].view(tensor.dtype)
            staged.copy_(chunk)
            post(staged).wait()
            chunk.copy_(staged)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view_as(tensor))


class _Call:
    def __init__(
        self,
        group: SharedGroup,
        number: int,
        tensors: list[Tensor],
        op: Op,
        kind: Kind,
        source: int,
    ):
        self.group, self.number, self.tensors, self.op, self.kind = group, number, tensors, op, kind
        self.source = source
        lengths = tuple([(t.numel(), t.dtype) for t in tensors])
        self.signature, self._text = _signature(kind, op, source, lengths)

    def __str__(self) -> str:
        return self._text

    def wait(self) -> None:
        self.group._finish(self)


@functools.lru_cache(4096)  # a training step makes the same calls again and again
def _signature(
    kind: Kind, op: Op, source: int, lengths: tuple[tuple[int, torch.dtype], ...]
) -> tuple[int, str]:
    """Checksum by which ranks compare a call, and the text that it is taken of."""
    how = f"from rank {source}" if kind == "broadcast" else op
    text = f"{kind} ({how}) of {', '.join(f'{n} {dtype}' for n, dtype in lengths)}"
    text = kind if kind == "barrier" else text
    return zlib.crc32(text.encode()), text


class _Transfer:
    def __init__(self, group: SharedGroup, number: int, parcels: list[Parcel]):
        self._group, self._number, self._parcels = group, number, parcels

    def wait(self) -> None:
        group, parcels = self._group, self._parcels

        def complete() -> bool:
            group._progress()  # a peer may wait for an all-reduce of ours before it sends
            group._mail.progress()
            return all(p.done for p in parcels)

        if not all(p.done for p in parcels):
            group._wait(
                complete,
                lambda: [p.peer for p in parcels if not p.done],
                f"transfer #{self._number}",
            )
        self._parcels = []


def shard_memory(
    group: Group, device: torch.device | None = None
) -> tuple[Allocate, Allocate | None]:
    """Where ZeRO allocates its vectors: those that `group` reduces in place, of which each rank
    owns an equal part, and, where ranks share memory, such vectors of which all ranks have one
    copy."""
    inner = unwrapped(group)
    if not isinstance(inner, SharedGroup):
        return functools.partial(_private, device=device), None
    even = functools.partial(inner.allocate, even=True)
    return even, functools.partial(even, common=True) if inner.size > 1 else None


def _private(numel: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def _push(mine: Tensor, others: list[Tensor]) -> None:
    for other in others:
        other.copy_(mine)


def _bytes(tensor: Tensor) -> Tensor:
    flat: Any = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8)
