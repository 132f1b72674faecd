"""Shard snapshots: a thread copies the tables of one shard, as they were at the cut, to files.

    begin     the cut: under the shard's lock each table's version is noted, dense tables are copied
              in memory; returns at once, and pushes go on
    thread    writes the rows of the cut piece by piece, the lock taken for each piece
    status    whether it is done; its files with their sizes and digests
    end       a good snapshot can be the base of the next one, which then holds only what changed

Files go to the folder of the checkpoint where this process sees it, else to a spool of its own,
from where the client fetches them. A snapshot is of one tag; calls may be repeated.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from manyhands.errors import NotFinite, StoreError
from manyhands.server.shard import Shard
from manyhands.server.snapshots.copy_on_write import SIDE_BYTES, ErasedIds, TableCut
from manyhands.server.snapshots.piece_file import PieceWriter, WrittenFile
from manyhands.server.snapshots.row_pieces import RowPiece, read_pieces
from manyhands.server.tables.dense import DenseTable
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.tables.hashing import seed_of
from manyhands.server.tables.sparse import SparseTable

PROBE = "probe"  # a file in the folder, with the tag in it: a server that reads it sees the folder


@dataclass(frozen=True)
class SnapshotRequest:
    """What to save. `base` is the tag of the snapshot that this one adds to; "": a full one."""

    tag: str
    names: list[str]
    folder: str = ""
    base: str = ""
    incremental: bool = False  # remember what is erased, so that the next one can add to this one
    shard: int = 0  # this shard among all, for the names of files
    shards: int = 1
    side_bytes: int = SIDE_BYTES


@dataclass
class SnapshotStatus:
    """How far a snapshot is. `failure` is empty unless it failed; files are named when `done`."""

    done: bool = False
    failure: str = ""
    not_finite: bool = False  # why it failed: a row is not finite
    files: list[WrittenFile] = field(default_factory=list)


@dataclass
class _Cut:
    """A table at the cut: what an increment must know of its base."""

    table: SparseTable
    version: int
    erased: ErasedIds | None
    position: int  # in `erased`


class ShardSnapshots:
    """The snapshots of one shard, one at a time. Thread-safe."""

    def __init__(self, shard: Shard):
        self.shard = shard
        self._lock = threading.Lock()
        self._now: _Snapshot | None = None
        self._base: tuple[str, dict[str, _Cut]] = "", {}

    def begin(self, request: SnapshotRequest) -> tuple[bool, str]:
        """Make the cut. Returns whether the folder is seen here, and, where nothing was begun, why
        the snapshot cannot add to its base: ask for a full one then.
        """
        if not re.fullmatch(r"[0-9a-z-]{1,64}", request.tag):
            raise StoreError(f"a snapshot called {request.tag!r}; small letters, digits and - only")
        with self._lock:
            if self._now is not None and self._now.request == request:
                return self._now.direct, ""  # asked again after a lost answer
            self._abandon()
            if request.base and request.base != self._base[0]:
                return False, f"this shard does not know the snapshot {request.base}"
            base = self._base[1] if request.base else {}
            snapshot = _Snapshot(self.shard, request)
            try:
                why = snapshot.begin(base)
            except BaseException:
                snapshot.clean_up()
                raise
            if why:
                snapshot.clean_up()
                return snapshot.direct, why
            self._now = snapshot
            snapshot.thread.start()
            return snapshot.direct, ""

    def status(self, tag: str) -> SnapshotStatus:
        return self._of(tag).status

    def fetch(self, tag: str, name: str, at: int, nbytes: int) -> bytes:
        """A part of a file that could not be written to the folder."""
        snapshot = self._of(tag)
        if not any(file.name == name for file in snapshot.status.files):
            raise StoreError(f"the snapshot {tag} has no file {name!r}")
        with (snapshot.folder / name).open("rb") as file:
            file.seek(at)
            return file.read(nbytes)

    def end(self, tag: str, good: bool) -> None:
        """Forget a snapshot; a good one becomes the base that the next one may add to."""
        with self._lock:
            snapshot = self._now
            if snapshot is None or snapshot.request.tag != tag:
                return  # asked again after a lost answer
            good = good and snapshot.status.done and not snapshot.status.failure
            self._abandon()
            if good and snapshot.request.incremental:
                self._base = tag, snapshot.cuts
                with self.shard.lock:
                    for cut in snapshot.cuts.values():
                        if cut.erased is not None:
                            cut.erased.forget(cut.position)

    def _of(self, tag: str) -> _Snapshot:
        with self._lock:
            if self._now is None or self._now.request.tag != tag:
                raise StoreError(f"there is no snapshot {tag} on this shard; begin it again")
            return self._now

    def _abandon(self) -> None:
        if self._now is not None:
            self._now.stop.set()
            self._now.thread.join()
            self._now.clean_up()
            self._now = None


class _Snapshot:
    """One snapshot of one shard."""

    def __init__(self, shard: Shard, request: SnapshotRequest):
        self.shard, self.request = shard, request
        self.status, self.stop = SnapshotStatus(), threading.Event()
        self.cuts: dict[str, _Cut] = {}
        self.thread = threading.Thread(target=self._run, name="manyhands-snapshot", daemon=True)
        self.folder = Path(request.folder)
        self.direct = self._sees_folder()
        if not self.direct:
            self.folder = Path(tempfile.mkdtemp(prefix="manyhands-snapshot-"))
        self._tables: list[_TableCopy] = []

    def _sees_folder(self) -> bool:
        """The client has put the tag there: so it is the same folder, and the client may write to
        it, as this process then does for it."""
        if not self.request.folder:
            return False
        try:
            return (self.folder / PROBE).read_text() == self.request.tag and os.access(
                self.folder, os.W_OK
            )
        except (OSError, UnicodeDecodeError):
            return False

    def begin(self, base: dict[str, _Cut]) -> str:
        """The cut. Returns why it cannot add to its base; "": it has begun."""
        request, shard = self.request, self.shard
        for name in request.names:  # files are made before the lock is taken
            path = self.folder / file_name(name, request.tag, request.shard)
            path.unlink(missing_ok=True)
            self._tables.append(_TableCopy(name, PieceWriter(path), request))
        with shard.lock:
            tables = [shard.table(name) for name in request.names]
            for name, table in zip(request.names, tables, strict=True):
                cut = base.get(name)
                if request.base and isinstance(table, SparseTable):
                    if cut is None or cut.table is not table or cut.erased is not table.erased:
                        return f"table {name!r} was made or restored since its base"
                    if cut.erased is None or cut.erased.since(cut.position) is None:
                        return f"too many rows of table {name!r} were erased since its base"
            marks = shard.dedup.dump().tolist()
            for copy, table in zip(self._tables, tables, strict=True):
                more = shard.compensation.state(copy.name)
                copy.begin(table, base.get(copy.name), more, marks)
                if isinstance(table, SparseTable):
                    if request.incremental and table.erased is None:
                        table.erased = ErasedIds()
                    log = table.erased if request.incremental else None
                    position = log.position if log is not None else 0
                    self.cuts[copy.name] = _Cut(table, table.version, log, position)
        return ""

    def _run(self) -> None:
        files: list[WrittenFile] = []
        try:
            for copy in self._tables:
                files.append(copy.run(self.shard, self.stop))
            self.status = SnapshotStatus(True, files=files)
        except Exception as e:  # a full disk, a row that is not finite: training goes on
            self._release()
            text = str(e) if isinstance(e, StoreError) else f"{type(e).__name__}: {e}"
            self.status = SnapshotStatus(True, text, isinstance(e, NotFinite))

    def _release(self) -> None:
        with self.shard.lock:
            for copy in self._tables:
                copy.end()

    def clean_up(self) -> None:
        """Remove what is not needed: the spool, and files that were not completed."""
        self._release()
        for copy in self._tables:
            if not copy.complete:
                copy.writer.abandon()
        if not self.direct:
            shutil.rmtree(self.folder, ignore_errors=True)


class _TableCopy:
    """One table of a snapshot, on its way to its file."""

    def __init__(self, name: str, writer: PieceWriter, request: SnapshotRequest):
        self.name, self.writer, self.request = name, writer, request
        self.head: dict[str, Any] = {}
        self.complete = False
        self.cut: TableCut | None = None
        self._arrays: list[np.ndarray] = []
        self._erased = np.empty(0, np.int64)

    # -- the cut, under the shard's lock --

    def begin(
        self,
        table: SparseTable | DenseTable,
        base: _Cut | None,
        more_state: dict[str, np.ndarray],
        marks: list[int],
    ) -> None:
        request = self.request
        self.head = {
            "table": asdict(table.spec),
            "tag": request.tag,
            "base": request.base,
            "shard": request.shard,
            "shards": request.shards,
            "version": table.version,
            "step": table.optimizer.step,
            "counts_pushes": table.optimizer.kind.counts_pushes,
            "marks": marks,
        }
        if isinstance(table, DenseTable):
            state = {**table.state, **more_state}
            arrays = {"values": table.values, **{f"state/{k}": x for k, x in state.items()}}
            self._arrays = [x.copy() for x in arrays.values()]
            described = [[k, x.dtype.str] for k, x in arrays.items()]
            self.head |= {"arrays": described, "start": table.start, "stop": table.stop}
            return
        since = -1 if base is None else base.version
        if base is not None and base.erased is not None:
            gone = base.erased.since(base.position)
            self._erased = self._erased if gone is None else gone
        self.head |= {
            "since": since,
            "stride": table.stride,
            "time_base": table.storage.time_base,
            "state": table.widths,
        }
        if table.storage.time_shift:  # when a row was pushed is not known exactly: copy it now
            for piece in read_pieces(table, since):
                self._write(piece)
        else:
            self.cut = TableCut(table, since, self._write_aside, request.side_bytes)
            self.cut.begin()

    def end(self) -> None:
        if self.cut is not None:
            self.cut.end()

    # -- the thread --

    def run(self, shard: Shard, stop: threading.Event) -> WrittenFile:
        self.writer.erased(self._erased)
        for number, array in enumerate(self._arrays):
            self.writer.array(number, array)
        self._arrays = []
        cut = self.cut
        while cut is not None:
            with shard.lock:
                if shard.contents.get(self.name) is not cut.table:
                    cut.fail("it was emptied meanwhile")
                if stop.is_set() and cut.failure is None:
                    cut.fail("the snapshot was given up")
                if cut.failure is not None:
                    raise cut.failure
                aside = cut.take_side()
                piece = None if cut.done else cut.next_piece()
                if cut.failure is not None:
                    raise cut.failure
                if piece is None:
                    cut.end()
            for old in aside:
                self._write_aside(old)
            if piece is None:
                break
            self._write(piece)
        self.complete = True
        return self.writer.close(self.head)

    def _write(self, piece: RowPiece) -> None:
        self._check_finite(piece)
        self.writer.rows(piece)

    def _write_aside(self, piece: RowPiece) -> None:
        self._check_finite(piece)
        self.writer.rows(piece, aside=True)

    def _check_finite(self, piece: RowPiece) -> None:
        dim = self.head["table"]["dim"]
        if not finite(piece.rows.reshape(-1)):
            bad = ~np.isfinite(piece.rows[:, :dim]).all(axis=1)
            if bad.any():
                ids = piece.ids[bad]
                some = ", ".join(map(str, ids[:5].tolist())) + ", ..." * (ids.size > 5)
                raise NotFinite(
                    f"table {self.name!r}: rows are NaN or infinite (ids {some}), so it is not "
                    "saved; lower its learning rate, or look at its server optimizer"
                )


def file_name(table: str, tag: str, shard: int) -> str:
    """The file of a table on a shard. Names of tables may hold anything; file names may not."""
    name = quote(table, safe="")
    if len(name) > 120:
        name = f"{name[:100]}~{seed_of(table):016x}"
    return f"{name}.{tag}.{shard}"
