"""Table pieces: a whole table in bounded messages, from a shard and back.

A sparse table goes by ranges of hashes, a dense one by parts of its arrays. `dump_piece` is for
small tables and for tests, while nobody pushes; a checkpoint is a snapshot (`shard_snapshot`).
"""

from __future__ import annotations

import numpy as np

from manyhands.server.shard import Shard
from manyhands.server.snapshots.row_pieces import END, read_piece
from manyhands.server.tables.dump import STATE
from manyhands.server.tables.sparse import SparseTable

Arrays = dict[str, np.ndarray]
LAST = -1
_PLACE = 44  # bits of a place within an array of a dense table; above them the array's number


def dump_piece(shard: Shard, name: str, start: int, nbytes: int) -> tuple[Arrays, int]:
    """A piece of a table from `start` on, of about `nbytes`; and where the next begins, or LAST."""
    with shard.lock:
        table = shard.table(name)
        if not isinstance(table, SparseTable):
            state = {**table.state, **shard.compensation.state(name)}
            arrays = {"values": table.values, **{f"{STATE}{key}": x for key, x in state.items()}}
            arrays["version"] = np.array([table.version, table.optimizer.step], np.int64)
            return _dense_piece(arrays, start, nbytes)
        piece = read_piece(table, start, most=max(1, nbytes // (table.row_bytes + 48)))
        values, state = table.views(piece.rows)
        if table.optimizer.kind.counts_pushes:
            state = {**state, "step": np.full((piece.ids.size, 1), table.optimizer.step, np.int64)}
        content = {
            "ids": piece.ids,
            "values": values,
            "meta": np.stack([piece.counts, piece.times], 1),
            **{f"{STATE}{key}": x for key, x in state.items()},
            "version": np.array([table.version, table.optimizer.step], np.int64),
        }
        return content, piece.stop if piece.stop < END else LAST


def _dense_piece(arrays: Arrays, start: int, nbytes: int) -> tuple[Arrays, int]:
    number, at = start >> _PLACE, start & ((1 << _PLACE) - 1)
    name, array = list(arrays.items())[number]
    flat = array.reshape(-1)
    stop = min(flat.size, at + max(1, nbytes // flat.itemsize))
    if stop < flat.size:
        after = number << _PLACE | stop
    else:
        after = number + 1 << _PLACE if number + 1 < len(arrays) else LAST
    return {name: flat[at:stop].copy()}, after


class ArrayParts:
    """Joins arrays that come in parts, by table."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, list[np.ndarray]]] = {}

    def add(self, table: str, arrays: Arrays, more: bool) -> Arrays | None:
        """All arrays, when none follows; None before."""
        if not more and table not in self._of:
            return arrays
        kept = self._of.setdefault(table, {})
        for name, x in arrays.items():
            kept.setdefault(name, []).append(x.copy())
        if more:
            return None
        del self._of[table]
        return {name: np.concatenate(parts) for name, parts in kept.items()}

    def clear(self, table: str) -> None:
        self._of.pop(table, None)


def join_pieces(pieces: list[Arrays]) -> Arrays:
    """One content from the pieces of a shard; counters are those of the first."""
    names = dict.fromkeys(name for piece in pieces for name in piece)
    return {
        name: pieces[0][name]
        if name == "version" and name in pieces[0]
        else np.concatenate([piece[name] for piece in pieces if name in piece])
        for name in names
    }
