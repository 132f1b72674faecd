"""Table reader: a saved table, full and incremental files together, without loading all of it.

reader = TableReader(layers)          the files of a full snapshot, then those of each increment
reader.rows(ids)                      finds rows by memory map
reader.contents()                     all of it in bounded pieces, to restore: a later layer's
                                      rows replace earlier ones, and its erased ids erase them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.errors import CheckpointError
from manyhands.server.snapshots.piece_file import ASIDE, ROWS, PieceFile
from manyhands.server.snapshots.row_pieces import RowPiece
from manyhands.server.tables.hashing import hash_ids, seed_of

Arrays = dict[str, np.ndarray]


class TableReader:
    """One table of a checkpoint. `layers`: the files of all shards, oldest layer first."""

    def __init__(self, layers: Sequence[Sequence[Path]]):
        self._layers = [[_Lookup(PieceFile(path)) for path in files] for files in layers]
        self._check_chain()
        newest = [lookup.file.head for lookup in self._layers[-1]]
        self.head = newest[0]
        self.table: dict[str, Any] = self.head["table"]
        self.name: str = self.table["name"]
        self.dtype, self.dim = np.dtype(self.table["dtype"]), int(self.table["dim"])
        self.version = max(int(head["version"]) for head in newest)
        self.step = max(int(head["step"]) for head in newest)

    def _check_chain(self) -> None:
        before = ""
        for layer in self._layers:
            tags = {lookup.file.head["tag"] for lookup in layer}
            bases = {lookup.file.head["base"] for lookup in layer}
            if len(tags) != 1 or bases != {before} or not layer:
                path = layer[0].file.path if layer else "a table"
                raise CheckpointError(
                    f"table file {path} adds to {sorted(bases)}, but {before or 'none'} comes "
                    "before it: files of different checkpoints were mixed"
                )
            before = tags.pop()

    @property
    def sparse(self) -> bool:
        return self.table["length"] is None

    @property
    def state(self) -> dict[str, int]:
        """Numbers of optimizer state of each row, by name."""
        return dict(self.head["state"])

    # -- lookups --

    def rows(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values [n, dim] of rows and whether each is there; zeros where it is not."""
        ids = np.ascontiguousarray(ids, np.int64)
        found, out = np.zeros(ids.size, bool), np.zeros((ids.size, self.dim), self.dtype)
        hashes = np.empty(ids.size, np.uint64)
        hash_ids(ids, np.uint64(seed_of(self.name)), hashes)
        upper = (hashes >> np.uint64(32)).astype(np.int64)
        open_ = np.arange(ids.size)  # not decided by a later layer
        for layer in reversed(self._layers):
            decided = np.zeros(open_.size, bool)
            for lookup in layer:
                here = lookup.find(ids[open_], upper[open_], out, open_, self.dim)
                found[open_[here]] = True
                decided |= here | lookup.is_erased(ids[open_])
            open_ = open_[~decided]
        return out, found

    # -- all of it --

    def contents(self) -> Iterator[Arrays]:
        """Pieces for `restore_table`, in the order in which they must be applied."""
        version = np.array([self.version, self.step], np.int64)
        base = np.array([max(x.file.head["time_base"] for x in self._layers[-1])], np.int64)
        common = {"version": version, "time_base": base}
        yield {**self._arrays(self._no_rows()), **common}
        for layer in self._layers:
            for lookup in layer:
                gone = lookup.file.erased()
                for at in range(0, gone.size, 1 << 16):
                    yield {"erased": gone[at : at + (1 << 16)], **common}
            for lookup in layer:
                for piece in lookup.file.row_pieces():
                    yield {**self._arrays(piece), **common}

    def whole(self) -> Arrays:
        """All rows at once, in the order of their ids, as `dump` returns them."""
        if not self.sparse:
            return self._whole_dense()
        newer, kept = np.empty(0, np.int64), [self._no_rows()]
        for layer in reversed(self._layers):
            pieces = [piece for lookup in layer for piece in lookup.file.row_pieces()]
            kept += [_only(piece, ~np.isin(piece.ids, newer)) for piece in pieces]
            gone = [lookup.file.erased() for lookup in layer]
            newer = np.concatenate([newer, *gone, *(piece.ids for piece in pieces)])
        ids = np.concatenate([piece.ids for piece in kept])
        order = np.argsort(ids)
        together = RowPiece(
            ids[order],
            np.concatenate([piece.rows for piece in kept])[order],
            np.concatenate([piece.counts for piece in kept])[order],
            np.concatenate([piece.times for piece in kept])[order],
            0,
            0,
        )
        version = np.array([self.version, self.step], np.int64)
        return {**self._arrays(together), "version": version}

    def changed(self, since: int) -> Iterator[RowPiece]:
        """Rows whose last push came after a version. The same id may come again, later and newer:
        the last one counts."""
        for layer in self._layers:
            for lookup in layer:
                if int(lookup.file.head["version"]) > since:
                    for piece in lookup.file.row_pieces():
                        yield _only(piece, piece.times > since)

    def erased_after(self, tag: str) -> np.ndarray:
        """Ids erased after the snapshot of this tag, which is one of the layers."""
        tags = [layer[0].file.head["tag"] for layer in self._layers]
        later = self._layers[tags.index(tag) + 1 :]
        gone = [lookup.file.erased() for layer in later for lookup in layer]
        return np.unique(np.concatenate([*gone, np.empty(0, np.int64)]))

    def _arrays(self, piece: RowPiece) -> Arrays:
        n, at = piece.ids.size, self.dim
        content = {
            "ids": np.ascontiguousarray(piece.ids, np.int64),
            "values": np.ascontiguousarray(piece.rows[:, :at]),
            "meta": np.stack([piece.counts.astype(np.int64), piece.times], 1),
        }
        for name, width in self.state.items():
            content[f"state/{name}"] = np.ascontiguousarray(piece.rows[:, at : at + width])
            at += width
        if self.head["counts_pushes"]:
            content["state/step"] = np.full((n, 1), self.step, np.int64)
        return content

    def _no_rows(self) -> RowPiece:
        none = np.empty(0, np.int64)
        rows = np.empty((0, int(self.head["stride"])), self.dtype)
        return RowPiece(none, rows, none, none, 0, 0)

    def _whole_dense(self) -> Arrays:
        parts = sorted(self._layers[-1], key=lambda lookup: lookup.file.head["start"])
        shards = [lookup.file.arrays() for lookup in parts]
        joined = {
            key: x.copy() if x.dtype == np.int64 else np.concatenate([c[key] for c in shards])
            for key, x in shards[0].items()
        }
        return {**joined, "version": np.array([self.version, self.step], np.int64)}


class _Lookup:
    """Finds ids in one file. Pieces are checked when they are first read."""

    def __init__(self, file: PieceFile):
        self.file = file
        ordered = [entry for entry in file.pieces if entry.kind == ROWS]
        self._ordered = ordered
        self._starts = np.array([entry.start for entry in ordered], np.int64)
        self._pieces: dict[int, RowPiece] = {}
        self._aside: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._erased: np.ndarray | None = None

    def find(
        self, ids: np.ndarray, upper: np.ndarray, out: np.ndarray, at: np.ndarray, dim: int
    ) -> np.ndarray:
        """Write the values of ids to out[at]; returns which were there."""
        here = np.zeros(ids.size, bool)
        which = np.searchsorted(self._starts, upper, "right") - 1
        for number in np.unique(which[which >= 0]).tolist():
            piece = self._piece(number)
            mine = np.flatnonzero(which == number)
            places, there = _places(piece.ids, ids[mine])
            here[mine[there]] = True
            out[at[mine[there]]] = piece.rows[places[there], :dim]
        known, piece_of, row_of = self._aside_index()
        places, there = _places(known, ids)
        for i in np.flatnonzero(there & ~here).tolist():
            piece = self._aside_pieces[piece_of[places[i]]]
            out[at[i]] = piece.rows[row_of[places[i]], :dim]
            here[i] = True
        return here

    def is_erased(self, ids: np.ndarray) -> np.ndarray:
        if self._erased is None:
            self._erased = np.sort(self.file.erased())
        return _places(self._erased, ids)[1]

    def _piece(self, number: int) -> RowPiece:
        if number not in self._pieces:
            self._pieces[number] = self.file.row_piece(self._ordered[number])
        return self._pieces[number]

    def _aside_index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of rows that pushes kept: ids in order, the piece of each and its place there."""
        if self._aside is None:
            entries = [entry for entry in self.file.pieces if entry.kind == ASIDE]
            self._aside_pieces = [self.file.row_piece(entry) for entry in entries]
            none = np.empty(0, np.int64)
            ids = np.concatenate([none, *(p.ids for p in self._aside_pieces)])
            sizes = [p.ids.size for p in self._aside_pieces]
            pieces = np.repeat(np.arange(len(sizes)), sizes)
            rows = np.concatenate([none, *(np.arange(n) for n in sizes)])
            order = np.argsort(ids)
            self._aside = ids[order], pieces[order], rows[order]
        return self._aside


def _places(known: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where ids are in an ordered array, and whether they are there."""
    places = np.minimum(np.searchsorted(known, ids), max(0, known.size - 1))
    return places, known[places] == ids if known.size else np.zeros(ids.size, bool)


def _only(piece: RowPiece, which: np.ndarray) -> RowPiece:
    if which.all():
        return piece
    ids, rows, counts, times = (x[which] for x in piece[:4])
    return RowPiece(ids, rows, counts, times, piece.start, piece.stop)
