"""Whole tables over connections: dump, restore and snapshots, in frames of bounded size."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from manyhands.core import Table
from manyhands.server.client.connection import Connection
from manyhands.server.client.pending_request import PendingRequest
from manyhands.server.protocol import frame
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.arrays import pack, unpack
from manyhands.server.slots import SlotMap
from manyhands.server.snapshots.snapshot_requests import Ask, RemoteSnapshots
from manyhands.server.snapshots.store_snapshot import StoreSnapshot
from manyhands.server.snapshots.table_pieces import LAST, join_pieces
from manyhands.server.table_content import COMMON, Arrays, rows_of, slice_of

FRAME_BYTES = 8 << 20  # of rows in one frame, about


def _frame_bytes() -> int:
    return min(FRAME_BYTES, frame.PAYLOAD_BYTES // 4)


def asker(connection: Connection) -> Ask:
    """Sends one request and waits; returns the answer with its payload."""

    def ask(message: m.Message, what: str) -> tuple[m.Message, np.ndarray]:
        deadline = time.monotonic() + connection.timeout_s
        pending = PendingRequest(what, lambda: (message, ()), deadline)
        connection.wait(connection.post(pending))
        arrived = pending.arrived
        return pending.answer, np.empty(0, np.uint8) if arrived is None else arrived

    return ask


def dump_shard(connection: Connection, name: str) -> Arrays:
    """What one shard stores of a table."""
    ask, pieces, start = asker(connection), [], 0
    while start != LAST:
        answer, memory = ask(m.DumpTable(name, start, _frame_bytes()), f"dump of {name}")
        pieces.append(unpack(answer.arrays, memory))
        start = answer.stop
    return join_pieces(pieces)


def restore_dense(
    connections: Sequence[Connection],
    table: Table,
    spans: Sequence[tuple[int, int]],
    arrays: Mapping[str, np.ndarray],
) -> None:
    for connection, span in zip(connections, spans, strict=True):
        mine = {k: slice_of(table, torch.from_numpy(x), span) for k, x in arrays.items()}
        parts: list[Arrays] = []
        for name, x in mine.items():
            step = max(1, _frame_bytes() // x.itemsize)
            parts += [{name: x[at : at + step]} for at in range(0, max(1, x.size), step)]
        if sum(x.nbytes for x in mine.values()) <= _frame_bytes():
            parts = [mine]
        for number, part in enumerate(parts):
            _load(connection, table.name, number == 0, part, more=number + 1 < len(parts))


def restore_rows(
    connections: Sequence[Connection],
    table: Table,
    slots: SlotMap,
    contents: Iterable[Mapping[str, np.ndarray]],
) -> None:
    """Empty a sparse table and load contents into it, each row where its slot is."""
    for number, content in enumerate(contents):
        ids = content["ids"] if "ids" in content else content["erased"]
        owner = slots.shard_of(table.name, ids)
        size = max(1, sum(x.nbytes for k, x in content.items() if k not in COMMON))
        step = max(1, ids.size * _frame_bytes() // size)
        for s, connection in enumerate(connections):
            mine, share = np.flatnonzero(owner == s), float(np.mean(slots.owner == s))
            for at in range(0, max(1, mine.size), step):
                some = rows_of(content, mine[at : at + step], share)
                _load(connection, table.name, number == 0 and at == 0, some)


def _load(
    connection: Connection, name: str, clear: bool, arrays: Arrays, more: bool = False
) -> None:
    described, parts = pack(arrays)
    connection.ask(m.RestoreTable(name, clear, described, more), f"restore of {name}", parts)


def create_on_shards(
    connections: Sequence[Connection],
    table: Table,
    spans: Sequence[tuple[int, int]] | None,
    values: torch.Tensor | None,
    state: Mapping[str, torch.Tensor] | None,
) -> None:
    """Create a table on every shard; of a dense one (`spans`), its range with what it starts
    from."""
    for s, connection in enumerate(connections):
        content: Arrays = {}
        span = None if spans is None else spans[s]
        if span is not None:
            if values is not None:
                content["values"] = values.numpy()[span[0] : span[1]]
            for name, x in (state or {}).items():
                content[f"state/{name}"] = slice_of(table, x, span)
        described, parts = pack(content)
        connection.ask(m.CreateTable(table, span, described), f"create of {table.name}", parts)


def begin_snapshot(
    own: Sequence[Connection],
    names: Sequence[str],
    folder: Path,
    tag: str,
    base: str,
    incremental: bool,
) -> StoreSnapshot:
    """Begin a snapshot over connections of its own, which end with it."""
    ports = [RemoteSnapshots(asker(connection)) for connection in own]
    closing = [connection.close for connection in own]
    try:
        return StoreSnapshot.begin(ports, names, folder, tag, base, incremental, closing=closing)
    except BaseException:
        for close in closing:
            close()
        raise
