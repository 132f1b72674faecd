"""Snapshot requests: what a server answers about snapshots, and a client's view of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from manyhands.server.protocol import frame
from manyhands.server.protocol import messages as m
from manyhands.server.snapshots.piece_file import WrittenFile
from manyhands.server.snapshots.shard_snapshot import (
    ShardSnapshots,
    SnapshotRequest,
    SnapshotStatus,
)

# message, and what to call it in errors; returns the answer and its payload
Ask = Callable[[m.Message, str], tuple[Any, np.ndarray]]


def answer_snapshot(snapshots: ShardSnapshots, x: Any) -> tuple[m.Message, list[np.ndarray]]:
    """The answer to a request, and its payload."""
    match x:
        case m.BeginSnapshot():
            direct, why = snapshots.begin(
                SnapshotRequest(x.tag, x.names, x.folder, x.base, x.incremental, x.shard, x.shards)
            )
            return m.SnapshotState(direct, failure=why), []
        case m.GetSnapshot():
            state = snapshots.status(x.tag)
            files = [(f.name, f.nbytes, f.sha256) for f in state.files]
            return m.SnapshotState(True, state.done, state.failure, state.not_finite, files), []
        case m.FetchSnapshot():
            part = snapshots.fetch(x.tag, x.name, x.at, x.nbytes)
            return m.SnapshotPart(len(part)), [np.frombuffer(part, np.uint8)]
        case _:
            snapshots.end(x.tag, x.good)
            return m.Done(), []


class RemoteSnapshots:
    """The snapshots of a shard on a server, through a connection (see `SnapshotPort`)."""

    def __init__(self, ask: Ask):
        self._ask = ask

    def begin(self, request: SnapshotRequest) -> tuple[bool, str]:
        x = request
        message = m.BeginSnapshot(
            *(x.tag, x.names, x.folder, x.base, x.incremental, x.shard, x.shards)
        )
        state = self._ask(message, "begin of a snapshot")[0]
        return state.direct, state.failure

    def status(self, tag: str) -> SnapshotStatus:
        state = self._ask(m.GetSnapshot(tag), "snapshot")[0]
        files = [WrittenFile(*file) for file in state.files]
        return SnapshotStatus(state.done, state.failure, state.not_finite, files)

    def fetch(self, tag: str, name: str, at: int, nbytes: int) -> bytes:
        most = min(nbytes, frame.PAYLOAD_BYTES // 2)
        answer, payload = self._ask(m.FetchSnapshot(tag, name, at, most), "file of a snapshot")
        return payload[: answer.nbytes].tobytes()

    def end(self, tag: str, good: bool) -> None:
        self._ask(m.EndSnapshot(tag, good), "end of a snapshot")
