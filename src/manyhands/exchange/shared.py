"""Exchange between processes of one CPU host through memory that all of them map.

A tensor made by `allocate` lives at the same place in every rank's segment, so an all-reduce of it copies nothing:

    post      rank r says "my values for call t are final"
    reduce    when all have posted, r sums its part over all ranks' memory, in place        (reduce-scatter)
    push      and writes the sum into every rank's memory                                   (all-gather)
    done      r says so; when all are done, the call is complete everywhere

Every element is summed by one owner and copied, so all ranks hold the same bits. Who owns what follows from its place
in the segment, block by block in turn, so a slice has the owners it has within the whole. `reduce_scatter` leaves the
push out and `all_gather` is nothing but it; memory that is `common` to all ranks needs no push at all.
There is no helper thread: a rank that posts call t also reduces whatever earlier calls have become complete, so exchange
overlaps with backward without a second thread fighting for the core. Tensors from elsewhere travel through a small
staging buffer, messages between two ranks through a mailbox.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core import (
    Finished,
    Op,
    Tensors,
    Work,
)
from manyhands.errors import Deadlock, PeerLost
from manyhands.exchange import segments
from manyhands.exchange.mailbox import Mailboxes, Parcel
from manyhands.exchange.solo import check_source, to_oneself

BLOCK = 32 * 1024  # elements summed at a time: two blocks stay in the second-level cache
STAGING_BYTES = 4 << 20
BLOCKS_PER_OWNER = 8  # of a segment: enough that every bucket of a gradient has all ranks as owners
SIGNATURES = 4096  # calls of one rank that may be under way before a mismatch could go unnoticed
OWNED_BYTES = (4 << 10, 4 << 20)  # smallest and largest such block
SPINS = 20
LINE = 8  # int64 words between two ranks' counters: one cache line each

Between = Callable[[Tensor, Op], None]
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"]


@dataclass(frozen=True)
class _Segment:
    first: int  # address of its first byte in this process
    stop: int
    views: list[
        Tensor
    ]  # its bytes in every rank's copy; the same memory for all of them where it is common
    common: bool
    block: (
        int  # bytes in a row with one owner; 0: one equal part a rank, of whatever vector is given
    )


class SharedGroup:
    """`between`, if given, runs on each owner's part after the sum over this host and before the push: with a
    collective across hosts this is the hierarchical all-reduce. `owners` is how many ranks own parts then."""

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
    ):
        self.rank, self.size = rank, size
        self._store, self._timeout_s, self._meetings = store, timeout_s, 0
        self._between, self._owners, self._divisor = between, owners or size, divisor or size
        self._segments: list[_Segment] = []
        self._maps: list[list[mmap.mmap]] = []
        self._parts: dict[tuple[int, int, torch.dtype], list[list[tuple[Tensor, ...]]]] = {}
        self._queue: deque[_Call] = deque()
        self._calls = self._transfers = 0
        self._lock = threading.Lock()
        words = self._map(
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
        self._mail = Mailboxes(
            rank, size, rest[size + 2 * size**2 : size + 5 * size**2], store, self._fence
        )
        self._signatures = rest[size + 5 * size**2 :].reshape(size, SIGNATURES)
        self._pids[rank] = os.getpid()
        self._meet(b"")  # every pid is known before anybody waits for anybody
        self._staging = self.allocate(STAGING_BYTES, torch.uint8)

    # -- memory --

    def allocate(
        self, numel: int, dtype: torch.dtype, common: bool = False, even: bool = False
    ) -> Tensor:
        """A zeroed vector in shared memory: a copy a rank, or one that is common to all. Every rank must ask for the
        same, in the same order. `even`: it and each slice of it has one equal, contiguous part for every rank."""
        nbytes = max(64, numel * dtype.itemsize)
        maps = self._map(nbytes, made_by=0 if common else None)
        views = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        views = views * self.size if common else views
        mine = views[self.rank]
        # across hosts an owner's share should travel in one piece
        shares = self._owners * (BLOCKS_PER_OWNER if self._between is None else 1)
        least, most = OWNED_BYTES
        block = (
            max(least, min(most, math.ceil(nbytes / shares)))
            if self._between is None
            else math.ceil(nbytes / shares)
        )
        self._segments.append(
            _Segment(
                mine.data_ptr(),
                mine.data_ptr() + nbytes,
                views,
                common,
                0 if even else math.ceil(block / 64) * 64,
            )
        )
        return mine[: numel * dtype.itemsize].view(dtype)

    def own(self, tensor: Tensor) -> list[slice]:
        """Which elements of a vector from `allocate` this rank owns."""
        segment = self._placed(tensor)
        if not segment.block:
            return [
                slice(*(tensor.numel() * r // self._owners for r in (self.rank, self.rank + 1)))
            ]
        offset, size = tensor.data_ptr() - segment.first, tensor.element_size()
        found = []
        for index in range(offset // segment.block, -(-(offset + tensor.nbytes) // segment.block)):
            if index % self._owners == self.rank:
                start, stop = (
                    max(offset, index * segment.block),
                    min(offset + tensor.nbytes, (index + 1) * segment.block),
                )
                found.append(slice((start - offset) // size, (stop - offset) // size))
        return found

    def _map(self, nbytes: int, made_by: int | None = None) -> list[mmap.mmap]:
        """Map one segment a rank (or only the one of `made_by`), then unlink what this rank made."""
        makes = made_by is None or made_by == self.rank
        path, own = segments.create(nbytes) if makes else (None, None)
        paths = self._meet(str(path or "").encode())
        maps = [
            own if own is not None and r == self.rank else segments.attach(p.decode(), nbytes)
            for r, p in enumerate(paths)
            if p
        ]
        self._meet(b"")
        if path is not None:
            path.unlink()
        self._maps.append(maps)
        return maps

    def _meet(self, value: bytes) -> list[bytes]:
        """Exchange a few bytes with all ranks over the rendezvous store: start-up only."""
        self._meetings += 1
        key = f"shared/{self._meetings}/"
        self._store.set(f"{key}{self.rank}", value.decode() or "-")
        try:
            self._store.wait(
                [f"{key}{r}" for r in range(self.size)], timedelta(seconds=self._timeout_s)
            )
        except RuntimeError as e:
            missing = tuple(r for r in range(self.size) if not self._store.check([f"{key}{r}"]))
            raise PeerLost(
                f"rank {self.rank}: ranks {list(missing)} did not come to set up shared memory: {e}",
                missing,
            ) from e
        got = [self._store.get(f"{key}{r}") for r in range(self.size)]
        return [b"" if g == b"-" else g for g in got]

    # -- exchange --

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        if self.size == 1 and self._between is None:
            return Finished()
        placed, foreign = self._sorted(values)
        work: Work = self._post(placed, op) if placed else Finished()
        for v in foreign:
            self._through_staging(v, lambda staged: self._post([staged], op))
        return work

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        """Every rank copies from the memory of `source` into its own."""
        check_source(self, source)
        if self.size == 1:
            return Finished()
        placed, foreign = self._sorted(values)
        work: Work = self._post(placed, "sum", "broadcast", source) if placed else Finished()
        for v in foreign:
            self._through_staging(
                v, lambda staged: self._post([staged], "sum", "broadcast", source)
            )
        return work

    def barrier(self) -> None:
        """A call without tensors: it is over when all ranks have posted it."""
        if self.size > 1:
            self._post([], "sum", "barrier").wait()

    def _sorted(self, values: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """The non-empty tensors in memory from `allocate`, and those from elsewhere."""
        placed: list[Tensor] = []
        foreign: list[Tensor] = []
        for v in values.values():
            if v.numel():
                here = v.is_contiguous() and self._segment(v) is not None
                (placed if here else foreign).append(v)
        return placed, foreign

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        """Sum, but only into the owners' parts; the rest keeps what it had. For vectors from `allocate`."""
        return self._post(list(values.values()), op, "reduce_scatter")

    def all_gather(self, values: Tensors) -> Work:
        """Give everybody the owners' parts. For vectors from `allocate`."""
        return self._post(list(values.values()), "sum", "all_gather")

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        got = [{k: torch.empty(v.shape, dtype=v.dtype) for k, v in values.items()} for _ in peers]
        for k, v in values.items():
            flat = _bytes(v)
            sinks = [(p, _bytes(g[k])) for p, g in zip(peers, got, strict=True)]
            for start in range(0, flat.numel(), STAGING_BYTES):
                piece = flat[start : start + STAGING_BYTES]
                self._staging[: piece.numel()].copy_(piece)
                self._fence()
                for p in peers:
                    self._sent[self.rank, p] += 1
                for p, sink in sinks:
                    due = self._read[self.rank, p] + 1
                    self._await(self._sent, p, due)
                    sink[start : start + piece.numel()].copy_(
                        self._segments[0].views[p][: piece.numel()]
                    )
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
        """Leave: whoever waits for this rank from now on is told so instead of waiting for its process to end."""
        self._queue.clear()
        self._mail.close()
        self._fence()
        self._pids[self.rank] = 0

    # -- the engine --

    def _post(
        self, tensors: list[Tensor], op: Op, kind: Kind = "all_reduce", source: int = 0
    ) -> _Call:
        if kind in ("all_reduce", "reduce_scatter") and any(
            self._placed(t).common for t in tensors
        ):
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
                    self._read_from(call.source, tensor)
                    continue
                for blocks in self._part(tensor):
                    self._do(call, blocks)
            self._fence()
            self._done[self.rank] = call.number + 1

    def _compare(self, call: _Call) -> None:
        """Refuse a call that is another one on some rank, before any byte of it is mixed up."""
        signatures = self._signatures[:, call.number % SIGNATURES]
        if (others := np.flatnonzero(signatures != call.signature)).size:
            raise Deadlock(
                f"call #{call.number} is {call} on rank {self.rank}, but another one on ranks {others.tolist()}; all ranks must exchange the same "
                "tensors in the same order: look for a branch that depends on the rank or on its data"
            )

    def _do(self, call: _Call, blocks: list[tuple[Tensor, ...]]) -> None:
        """One row of blocks that this rank owns: sum it over ranks, then give it to all, as the call asks."""
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

    def _read_from(self, source: int, tensor: Tensor) -> None:
        segment = self._placed(tensor)
        if source != self.rank and not segment.common:
            offset = tensor.data_ptr() - segment.first
            theirs = segment.views[source][offset : offset + tensor.nbytes]
            tensor.detach().view(-1).copy_(theirs.view(tensor.dtype))

    def _divide(self, mine: Tensor, op: Op) -> None:
        if op == "mean":
            mine.div_(self._divisor) if mine.is_floating_point() else mine.floor_divide_(
                self._divisor
            )

    def _finish(self, call: _Call) -> None:
        # what lies in common memory is with everybody as soon as its owners have said that it is there
        there = (
            self._posted
            if call.kind == "all_gather" and all(s.common for s in map(self._placed, call.tensors))
            else self._done
        )
        if there.min() > call.number:
            return

        def complete() -> bool:
            self._progress()
            return bool(there.min() > call.number)

        def absent() -> list[int]:
            return [r for r in range(self.size) if there[r] <= call.number and r != self.rank]

        self._wait(complete, absent, f"{call.kind} #{call.number}")

    def _part(self, tensor: Tensor) -> list[list[tuple[Tensor, ...]]]:
        """What this rank owns of `tensor`: rows of cache-sized blocks, each block in every rank's memory, own first."""
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        if (found := self._parts.get(key)) is not None:
            return found
        segment = self._placed(tensor)
        offset = tensor.data_ptr() - segment.first
        copies = segment.views[:1] if segment.common else segment.views
        everyone = [v[offset : offset + tensor.nbytes].view(tensor.dtype) for v in copies]
        if not segment.common:
            everyone.insert(0, everyone.pop(self.rank))
        rows = [
            list(zip(*(e[own].split(BLOCK) for e in everyone), strict=True))
            for own in self.own(tensor)
        ]
        if (
            len(self._parts) > 1000
        ):  # foreign tensors of ever new lengths pass through the staging buffer
            self._parts.clear()
        self._parts[key] = rows
        return rows

    def _through_staging(self, tensor: Tensor, post: Callable[[Tensor], _Call]) -> None:
        flat = tensor.detach().contiguous().view(-1)
        step = STAGING_BYTES // tensor.element_size()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            staged = self._staging[: piece.nbytes].view(tensor.dtype)
            staged.copy_(piece)
            post(staged).wait()
            piece.copy_(staged)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view_as(tensor))

    def _placed(self, tensor: Tensor) -> _Segment:
        if (segment := self._segment(tensor)) is None:
            raise ValueError("only a vector from allocate() has owners")
        return segment

    def _segment(self, tensor: Tensor) -> _Segment | None:
        first = tensor.data_ptr()
        return next((s for s in self._segments if s.first <= first < s.stop), None)

    def _fence(self) -> None:
        # x86 keeps stores in order; elsewhere a flag could overtake the data it announces. Releasing a lock and
        # taking it again orders all earlier writes before all later ones on every machine we know.
        with self._lock:
            pass
        with self._lock:
            pass

    def _wait(self, ready: Callable[[], bool], absent: Callable[[], list[int]], what: str) -> None:
        """Spin for a moment, giving the core away each time; then sleep ever longer and look after the peers. Not longer: a rank
        that spins slows the one it waits for, where both share a physical core."""
        for _ in range(SPINS):
            if ready():
                self._fence()
                return
            self._mail.progress()  # a peer may need the rest of a message before it can do what we wait for
            os.sched_yield()
        start, nap_s, looked = time.monotonic(), 20e-6, 0.0
        while not ready():
            self._mail.progress()
            time.sleep(nap_s)
            waited = time.monotonic() - start
            nap_s = 20e-6 if waited < 0.02 else min(nap_s * 1.2, 0.5e-3)
            if waited - looked > 0.1:
                looked = waited
                self._look_after(absent, what, waited, ready)
        self._fence()

    def _look_after(
        self, absent: Callable[[], list[int]], what: str, waited_s: float, ready: Callable[[], bool]
    ) -> None:
        pids = {r: int(self._pids[r]) for r in absent()}
        gone = {r for r, pid in pids.items() if not pid or not segments.alive(pid)}
        # ask again: a rank may have come, done its part and left for good between the two questions
        if gone and not ready() and (lost := sorted(gone & set(absent()))):
            died = [r for r in lost if pids[r]]  # who left without dying did so because of these
            how = (
                f"rank {died[0]} (pid {pids[died[0]]}) died"
                if died
                else f"rank {lost[0]} closed its group"
            )
            raise PeerLost(
                f"{how}; rank {self.rank} was waiting for it in {what}", tuple(died or lost)
            )
        if waited_s > self._timeout_s:
            late = absent()
            raise PeerLost(
                f"ranks {late} (pids {[int(self._pids[r]) for r in late]}) are alive but did not come to {what} in "
                f"{waited_s:.0f} s, where rank {self.rank} waits; look at what they are doing (py-spy dump) or raise timeout_s",
                tuple(late),
            )


class _Call:
    def __init__(
        self,
        group: SharedGroup,
        number: int,
        tensors: list[Tensor],
        op: Op,
        kind: Kind,
        source: int = 0,
    ):
        self.group, self.number, self.tensors, self.op, self.kind = group, number, tensors, op, kind
        self.source = source
        self.signature = zlib.crc32(str(self).encode())

    def __str__(self) -> str:
        if self.kind == "barrier":
            return "barrier"
        how = f"from rank {self.source}" if self.kind == "broadcast" else self.op
        return f"{self.kind} ({how}) of {', '.join(f'{t.numel()} {t.dtype}' for t in self.tensors)}"

    def wait(self) -> None:
        self.group._finish(self)


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


def _push(mine: Tensor, others: list[Tensor]) -> None:
    for other in others:
        other.copy_(mine)


def _bytes(tensor: Tensor) -> Tensor:
    flat: Any = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8)
