"""Shared vectors: allocation in memory that all processes of a host map, and who owns which part.

    common=False    one copy per rank, at the same offset of every rank's segment
    common=True     one copy for all ranks

The owner of an element follows from its offset in the segment: segments are cut into blocks that
the ranks own in turn. So a slice has the same owners by itself as within the whole vector. With
`even`, each vector and each slice of it has one equal, contiguous part per rank instead.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.errors import PeerLost
from manyhands.exchange import segments
from manyhands.exchange.interruption import Interruption, wait_for_keys
from manyhands.exchange.reduce_scatter import equal_part

BLOCK = 32 * 1024  # elements summed at a time: two blocks stay in the second-level cache
BLOCKS_PER_OWNER = 8  # of a segment: enough that every bucket of a gradient has all ranks as owners
OWNED_BYTES = (4 << 10, 4 << 20)  # smallest and largest such block

Blocks = list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class SharedSegment:
    first: int  # address of its first byte in this process
    stop: int
    # its bytes in every rank's copy; where it is common, the same memory for all ranks
    views: list[Tensor]
    common: bool
    block: int  # consecutive bytes of one owner; 0: one equal part per rank, of the vector given


class SharedVectors:
    """The shared segments of one rank. All ranks must map and allocate the same, in the same order.

    `owners` ranks own parts, the first ones. `one_block`: an owner has one block per segment, so
    that its part crosses hosts in one message.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        timeout_s: float,
        owners: int,
        one_block: bool,
        interruption: Interruption | None = None,
    ):
        self.rank, self.size = rank, size
        self._store, self._timeout_s, self._gathered = store, timeout_s, 0
        self._owners, self._one_block = owners, one_block
        self._interruption = interruption
        self.segments: list[SharedSegment] = []
        self._maps: list[list[mmap.mmap]] = []
        self._blocks: dict[tuple[int, int, torch.dtype], list[Blocks]] = {}

    def allocate(self, numel: int, dtype: torch.dtype, common: bool, even: bool) -> Tensor:
        nbytes = max(64, numel * dtype.itemsize)
        maps = self.map(nbytes, made_by=0 if common else None)
        views = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        views = views * self.size if common else views
        mine = views[self.rank]
        least, most = OWNED_BYTES
        block = (
            math.ceil(nbytes / self._owners)
            if self._one_block
            else max(least, min(most, math.ceil(nbytes / (self._owners * BLOCKS_PER_OWNER))))
        )
        block = 0 if even else math.ceil(block / 64) * 64
        first = mine.data_ptr()
        self.segments.append(SharedSegment(first, first + nbytes, views, common, block))
        return mine[: numel * dtype.itemsize].view(dtype)

    def find(self, tensor: Tensor) -> SharedSegment | None:
        """The segment that holds `tensor`; None: it is in private memory."""
        first = tensor.data_ptr()
        return next((s for s in self.segments if s.first <= first < s.stop), None)

    def segment(self, tensor: Tensor) -> SharedSegment:
        if (segment := self.find(tensor)) is None:
            raise ValueError("only a vector from allocate() has owners")
        return segment

    def own(self, tensor: Tensor) -> list[slice]:
        """Which elements of a vector from `allocate` this rank owns."""
        segment = self.segment(tensor)
        if not segment.block:
            return [equal_part(tensor.numel(), self.rank, self._owners)]
        offset, width = tensor.data_ptr() - segment.first, tensor.element_size()
        stop = offset + tensor.nbytes
        found = []
        for index in range(offset // segment.block, -(-stop // segment.block)):
            if index % self._owners == self.rank:
                start = max(offset, index * segment.block)
                end = min(stop, (index + 1) * segment.block)
                found.append(slice((start - offset) // width, (end - offset) // width))
        return found

    def blocks(self, tensor: Tensor) -> list[Blocks]:
        """What this rank owns of `tensor`: rows of cache-sized blocks.

        Each block comes as a view of every rank's memory, this rank's first; of common memory there
        is one view.
        """
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        if (found := self._blocks.get(key)) is not None:
            return found
        segment = self.segment(tensor)
        offset = tensor.data_ptr() - segment.first
        copies = segment.views[:1] if segment.common else segment.views
        everyone = [v[offset : offset + tensor.nbytes].view(tensor.dtype) for v in copies]
        if not segment.common:
            everyone.insert(0, everyone.pop(self.rank))
        rows = [
            list(zip(*(e[own].split(BLOCK) for e in everyone), strict=True))
            for own in self.own(tensor)
        ]
        # tensors from elsewhere, of ever new lengths, pass through the staging buffer
        if len(self._blocks) > 1000:
            self._blocks.clear()
        self._blocks[key] = rows
        return rows

    def read_from(self, source: int, tensor: Tensor) -> None:
        """Copy what rank `source` has in the range of `tensor` into this rank's memory."""
        segment = self.segment(tensor)
        if source != self.rank and not segment.common:
            offset = tensor.data_ptr() - segment.first
            theirs = segment.views[source][offset : offset + tensor.nbytes]
            tensor.detach().view(-1).copy_(theirs.view(tensor.dtype))

    def map(self, nbytes: int, made_by: int | None = None) -> list[mmap.mmap]:
        """Map one segment per rank (or only the one of `made_by`), then unlink what this rank
        made."""
        makes = made_by is None or made_by == self.rank
        path, own = segments.create(nbytes) if makes else (None, None)
        try:
            paths = self.gather(str(path or ""))
            maps = [
                own if own is not None and r == self.rank else segments.attach(p, nbytes)
                for r, p in enumerate(paths)
                if p
            ]
            self.gather("")
        except FileNotFoundError as e:
            raise PeerLost(f"rank {self.rank}: another rank has left: {e.filename} is gone") from e
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
        self._maps.append(maps)
        return maps

    def gather(self, value: str) -> list[str]:
        """Exchange a short text with all ranks over the rendezvous store: at start-up only."""
        self._gathered += 1
        key = f"shared/{self._gathered}/"
        self._store.set(f"{key}{self.rank}", value or "-")
        keys = [f"{key}{r}" for r in range(self.size)]
        try:
            wait_for_keys(self._store, keys, self._timeout_s, self._interruption)
        except RuntimeError as e:
            missing = tuple(r for r in range(self.size) if not self._store.check([keys[r]]))
            raise PeerLost(
                f"rank {self.rank}: ranks {list(missing)} did not come to set up shared memory: "
                f"{e}; look at their logs, or raise timeout_s",
                missing,
            ) from e
        got = [self._store.get(k).decode() for k in keys]
        return ["" if g == "-" else g for g in got]
