"""Push buffers: memory of a connection's arena that callers write updates into.

A push whose updates are there is not copied, where that is possible: one shard, payload="none",
few repeated ids.
"""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from torch import Tensor

from manyhands.server.protocol.arena import Arena, ArenaBlock


class PushBuffers:
    def __init__(self) -> None:
        self._blocks: dict[int, ArenaBlock] = {}  # by address

    def allocate(self, arena: Arena, shape: tuple[int, ...], dtype: str) -> Tensor:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        block = arena.allocate(nbytes)
        array = block.memory[:nbytes].view(dtype).reshape(shape)
        arena.lend(block, array)
        arena.release(block)
        address = array.ctypes.data
        self._blocks[address] = block
        weakref.finalize(array, self._blocks.pop, address, None).atexit = False
        return torch.from_numpy(array)

    def find(self, arena: Arena, updates: np.ndarray | None) -> ArenaBlock | None:
        """The block that holds these updates, if it is of this arena; the caller gives it back."""
        if not self._blocks or updates is None:
            return None
        block = self._blocks.get(updates.ctypes.data)
        return (
            arena.retain(block) if block is not None and block.segment in arena.segments else None
        )
