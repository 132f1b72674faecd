"""Store snapshot: one snapshot of a store's tables over all of its shards.

    snapshot = StoreSnapshot.begin(shards, names, folder, tag, base)     the cut, on every shard
    snapshot.finish()                                                    waits; files are in folder
    snapshot.end(good=True)                                              the next may add to it

Shards that do not see the folder keep their files in a spool; those are fetched in bounded parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from manyhands.errors import ManyhandsError, NotFinite, StoreError
from manyhands.server.snapshots.piece_file import WrittenFile
from manyhands.server.snapshots.shard_snapshot import PROBE, SnapshotRequest, SnapshotStatus

FETCH_BYTES = 4 << 20
POLL_S = 0.02


class SnapshotPort(Protocol):
    """Snapshots of one shard: here (`ShardSnapshots`), or on a server."""

    def begin(self, request: SnapshotRequest) -> tuple[bool, str]: ...
    def status(self, tag: str) -> SnapshotStatus: ...
    def fetch(self, tag: str, name: str, at: int, nbytes: int) -> bytes: ...
    def end(self, tag: str, good: bool) -> None: ...


class StoreSnapshot:
    """A snapshot under way. `base`: the tag it adds to; "" where it is a full one."""

    def __init__(
        self,
        shards: Sequence[SnapshotPort],
        names: Sequence[str],
        folder: Path,
        tag: str,
        base: str,
        closing: Sequence[Callable[[], None]] = (),
    ):
        self.names, self.folder, self.tag, self.base = list(names), folder, tag, base
        self._closing = closing
        self._shards, self._direct = list(shards), [True] * len(shards)

    @classmethod
    def begin(
        cls,
        shards: Sequence[SnapshotPort],
        names: Sequence[str],
        folder: Path,
        tag: str,
        base: str = "",
        incremental: bool = False,
        *,
        closing: Sequence[Callable[[], None]] = (),
    ) -> StoreSnapshot:
        """Make the cut on all shards; nobody pushes during this call. Where one of them cannot add
        to `base`, the snapshot is a full one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROBE).write_text(tag)
        snapshot = cls(shards, names, folder, tag, base, closing)
        try:
            for s, shard in enumerate(snapshot._shards):
                request = SnapshotRequest(
                    *(tag, list(names), str(folder.absolute()), snapshot.base),
                    *(incremental, s, len(snapshot._shards)),
                )
                snapshot._direct[s], why = shard.begin(request)
                if why and base:
                    snapshot._end(good=False)
                    more = {"incremental": incremental, "closing": closing}
                    return cls.begin(shards, names, folder, tag, "", **more)  # type: ignore
                if why:
                    raise StoreError(why)
        except BaseException:
            snapshot._end(good=False)
            raise
        return snapshot

    def finish(self) -> dict[str, list[WrittenFile]]:
        """Wait until all files are in the folder; by table, one a shard. Raises NotFinite where a
        row is not finite, StoreError where a shard could not write, ServerLost where it is gone.
        """
        try:
            shards = [self._files(s) for s in range(len(self._shards))]
            return {name: [files[i] for files in shards] for i, name in enumerate(self.names)}
        finally:
            (self.folder / PROBE).unlink(missing_ok=True)

    def _files(self, s: int) -> list[WrittenFile]:
        shard = self._shards[s]
        while not (status := shard.status(self.tag)).done:
            time.sleep(POLL_S)
        if status.failure:
            raise (NotFinite if status.not_finite else StoreError)(status.failure)
        if not self._direct[s]:
            for file in status.files:
                self._fetch(shard, file)
        return status.files

    def _fetch(self, shard: SnapshotPort, file: WrittenFile) -> None:
        digest, at = hashlib.sha256(), 0
        with (self.folder / file.name).open("wb") as out:
            while at < file.nbytes:
                part = shard.fetch(self.tag, file.name, at, FETCH_BYTES)
                if not part:
                    break
                digest.update(part)
                out.write(part)
                at += len(part)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != file.sha256:
            raise StoreError(
                f"the file {file.name} of a snapshot came with another checksum than it was "
                "written with; look at the disk and the network of that server"
            )

    def end(self, good: bool) -> None:
        """Let the shards forget it, or, where it is `good`, take it for the base of the next."""
        self._end(good)
        for close in self._closing:
            close()

    def _end(self, good: bool) -> None:
        for shard in self._shards:
            with contextlib.suppress(ManyhandsError):  # it is gone: nothing to forget
                shard.end(self.tag, good)
