"""Row chunks: a large pull over a socket, read and sent piece by piece.

Each piece is read into a buffer that stays in the cache, and sent while the worker already reads
the ones before. Rows of different chunks may be of different versions: others may push in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manyhands.errors import StoreError
from manyhands.server.protocol import arena
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel, Closed, encode
from manyhands.server.replication.replicator import NotLeading
from manyhands.server.table_updates import TablePull

CHUNK_BYTES = 1 << 21  # read and sent at a time


def send_in_chunks(
    channel: Channel,
    read: Callable[[TablePull, np.ndarray], int],
    number: int,
    pulls: Sequence[TablePull],
    shapes: Sequence[Any],
    applied: bool,
    buffer: np.ndarray,
) -> None:
    """Answer request `number`. `read` writes rows to an array and returns the shard's version;
    `shapes` are dtype, count of numbers, width and shape of each pull."""
    total = sum(arena.aligned(count * dtype.itemsize) for dtype, count, _, _ in shapes)
    begun = False
    for pull, (dtype, count, width, shape) in zip(pulls, shapes, strict=True):
        row_bytes = width * dtype.itemsize
        step = max(1, CHUNK_BYTES // row_bytes) if pull.ids is not None else shape[0]
        for first in range(0, shape[0], step):
            n = min(step, shape[0] - first)
            nbytes = n * (row_bytes if pull.ids is not None else dtype.itemsize)
            room = buffer if nbytes <= buffer.size else np.empty(nbytes, np.uint8)
            raw = room[:nbytes]
            ids = None if pull.ids is None else pull.ids[first : first + n]
            out = raw.view(dtype).reshape((n, width) if ids is not None else (n,))
            try:
                version = read(TablePull(pull.table, ids), out)
            except (StoreError, NotLeading) as e:
                if begun:  # too late for an error message: the frame has begun
                    raise Closed(str(e)) from e
                raise
            views = [raw.data]
            if not begun:
                views.insert(0, memoryview(encode(m.RowsReply(version, applied), number, total)))
                begun = True
            if first + n == shape[0]:
                views.append(memoryview(bytes(-(count * dtype.itemsize) % arena.ALIGN)))
            channel.write(views)
    if not begun:
        raise StoreError("the pull names no table; name one at least")
