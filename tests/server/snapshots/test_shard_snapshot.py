"""Snapshots of shards: the state at the cut, to the bit, whatever is pushed meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.core import Table
from manyhands.errors import CheckpointError, NotFinite, StoreError
from manyhands.server.protocol.messages import PushMessage
from manyhands.server.shard import Shard
from manyhands.server.snapshots import row_pieces
from manyhands.server.snapshots.piece_file import PieceFile
from manyhands.server.snapshots.shard_snapshot import ShardSnapshots, SnapshotRequest
from manyhands.server.snapshots.store_snapshot import StoreSnapshot
from manyhands.server.snapshots.table_reader import TableReader
from manyhands.server.table_updates import TableUpdate

ROWS = Table("users/of all", dim=4, optimizer="adam", options={"lr": 0.1})
EXPIRES = Table("expires", dim=2, optimizer="adagrad", expire_after=8)
COARSE = Table("coarse", dim=2, optimizer="sgd", expire_after=2**22)
DENSE = Table("w", length=5000, optimizer="momentum", options={"lr": 0.1, "momentum": 0.9})
TABLES = (ROWS, EXPIRES, COARSE, DENSE)
NAMES = [t.name for t in TABLES]


class Pusher:
    """Pushes random rows to all tables of a shard, as one worker."""

    def __init__(self, shard: Shard, worker: int = 0, seed: int = 0):
        self.shard, self.worker, self.sequence = shard, worker, 0
        self.dice = np.random.default_rng((seed, worker))

    def push(self, n: int = 200, ids: int = 4000) -> None:
        parts = []
        for table in TABLES:
            if table.length is not None:
                g = self.dice.standard_normal(table.length).astype(np.float32)
                parts.append(TableUpdate(table.name, None, g))
            else:
                some = self.dice.integers(0, ids, n)
                g = self.dice.standard_normal((n, table.dim)).astype(np.float32)
                parts.append(TableUpdate(table.name, some, g))
        self.shard.push(self.worker, 0, self.sequence, parts, PushMessage())
        self.sequence += 1


def filled(pushes: int = 10) -> tuple[Shard, Pusher]:
    shard = Shard()
    for table in TABLES:
        shard.create(table)
    pusher = Pusher(shard)
    for _ in range(pushes):
        pusher.push()
    return shard, pusher


def state_of(shard: Shard) -> dict[str, dict[str, np.ndarray]]:
    found = {}
    for name in NAMES:
        content = shard.dump(name)
        del content["marks"]
        if "ids" in content:
            order = np.argsort(content["ids"])
            content = {k: x if k == "version" else x[order] for k, x in content.items()}
        found[name] = content
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert sorted(found[name]) == sorted(expected[name])
        for key, x in expected[name].items():
            np.testing.assert_array_equal(found[name][key], x, err_msg=f"{name} {key}")


def read(layers: list[tuple[Path, dict[str, Any]]]) -> dict[str, TableReader]:
    """Readers of all tables from the folders and files of snapshots, oldest first."""
    return {
        name: TableReader([[folder / f.name for f in files[name]] for folder, files in layers])
        for name in NAMES
    }


def restored(readers: dict[str, TableReader]) -> dict[str, Any]:
    shard = Shard()
    for table in TABLES:
        shard.create(table)
    for name, reader in readers.items():
        for content in reader.contents() if reader.sparse else [reader.whole()]:
            shard.load(name, content)
    return state_of(shard)


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_is_the_state_at_the_cut_while_threads_push(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pieces, "ROWS", 20)  # many pieces, so that pushes come between them
    shard, _ = filled(12)
    ports, stop = [ShardSnapshots(shard)], threading.Event()
    pushers = [Pusher(shard, worker, seed) for worker in (1, 2, 3)]
    expected = state_of(shard)
    snapshot = StoreSnapshot.begin(ports, NAMES, tmp_path, "cut-1")

    def work(pusher: Pusher) -> None:
        while not stop.is_set():
            pusher.push(n=50, ids=6000)

    threads = [threading.Thread(target=work, args=(p,)) for p in pushers]
    for thread in threads:
        thread.start()
    try:
        files = snapshot.finish()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    readers = read([(tmp_path, files)])
    assert_same({name: reader.whole() for name, reader in readers.items()}, expected)
    assert_same(restored(readers), expected)
    assert readers[ROWS.name].head["marks"] == [0, 0, 12, 0]
    assert len(PieceFile(tmp_path / files[ROWS.name][0].name).pieces) > 20


def test_a_chain_of_increments_is_the_live_state(tmp_path: Path) -> None:
    shard, pusher = filled(12)
    ports, layers, base = [ShardSnapshots(shard)], [], ""
    for n in range(4):
        folder = tmp_path / str(n)
        expected = state_of(shard)
        snapshot = StoreSnapshot.begin(ports, NAMES, folder, f"cut-{n}", base, incremental=True)
        assert snapshot.base == base
        for _ in range(10):
            pusher.push(n=20, ids=6000)
        layers.append((folder, snapshot.finish()))
        snapshot.end(good=n != 2)  # as when the disk was full: the next adds to the one before it
        if n == 2:
            layers.pop()
            continue
        base = f"cut-{n}"
        readers = read(layers)
        assert_same({name: reader.whole() for name, reader in readers.items()}, expected)
        assert_same(restored(readers), expected)
    sizes = [files[ROWS.name][0].nbytes for _, files in layers]
    assert max(sizes[1:]) < sizes[0] / 3, "an increment holds what changed"
    erased = readers[EXPIRES.name].erased_after("cut-1")
    assert erased.size and not np.isin(erased, shard.dump(EXPIRES.name)["ids"]).all()


def test_lookups_by_memory_map_are_those_of_the_whole_table(tmp_path: Path) -> None:
    shard, pusher = filled(10)
    ports, layers = [ShardSnapshots(shard)], []
    for n, base in enumerate(["", "cut-0", "cut-1"]):
        snapshot = StoreSnapshot.begin(ports, NAMES, tmp_path / str(n), f"cut-{n}", base, True)
        for _ in range(20):
            pusher.push(n=30)
        layers.append((tmp_path / str(n), snapshot.finish()))
        snapshot.end(good=True)
    for name in NAMES[:3]:
        reader = read(layers)[name]
        whole = reader.whole()
        ids = np.concatenate([np.arange(-5, 4100), [2**62, -(2**63)]])
        values, found = reader.rows(ids)
        assert sorted(ids[found].tolist()) == whole["ids"].tolist()
        np.testing.assert_array_equal(values[found], whole["values"])
        assert not values[~found].any()


def test_a_changed_table_needs_a_full_snapshot(tmp_path: Path) -> None:
    shard, _ = filled(3)
    ports = [ShardSnapshots(shard)]
    first = StoreSnapshot.begin(ports, NAMES, tmp_path / "a", "cut-0", incremental=True)
    first.finish()
    first.end(good=True)
    shard.load(ROWS.name, shard.dump(ROWS.name))
    second = StoreSnapshot.begin(ports, NAMES, tmp_path / "b", "cut-1", "cut-0", True)
    assert second.base == ""
    second.finish()
    second.end(good=True)
    unknown = StoreSnapshot.begin(ports, NAMES, tmp_path / "c", "cut-2", "another", True)
    assert unknown.base == ""
    unknown.end(good=False)


def test_a_table_emptied_meanwhile_fails_the_snapshot(tmp_path: Path) -> None:
    shard, _ = filled(3)
    snapshots = ShardSnapshots(shard)
    snapshot = StoreSnapshot([snapshots], [ROWS.name], tmp_path, "cut-0", "")
    table = shard.table(ROWS.name)
    request = SnapshotRequest("cut-0", [ROWS.name])
    begun = threading.Event()
    original = shard.lock

    class Slow:
        """A lock that lets the table be emptied between the cut and the first piece."""

        def __enter__(self) -> None:
            original.acquire()
            if begun.is_set() and shard.contents[ROWS.name] is table:
                original.release()
                shard.lock = original
                shard.clear(ROWS.name)
                original.acquire()
            begun.set()

        def __exit__(self, *_: object) -> None:
            original.release()

    shard.lock = Slow()  # type: ignore[assignment]
    snapshots.begin(request)
    with pytest.raises(StoreError, match=r"users/of all.*emptied meanwhile"):
        snapshot.finish()
    snapshot.end(good=False)


def test_a_row_that_is_not_finite_is_named_and_not_saved(tmp_path: Path) -> None:
    shard, pusher = filled(3)
    content = shard.dump(EXPIRES.name)
    content["values"][5] = np.inf
    shard.load(EXPIRES.name, content)
    snapshot = StoreSnapshot.begin([ShardSnapshots(shard)], NAMES, tmp_path, "cut-0")
    with pytest.raises(NotFinite, match=rf"'expires'.*ids {content['ids'][5]}\b"):
        snapshot.finish()
    snapshot.end(good=False)
    pusher.push()
    assert all(table.cut is None for table in shard.contents.values() if hasattr(table, "cut"))


def test_a_flipped_bit_and_a_torn_file_are_refused_by_name(tmp_path: Path) -> None:
    shard, _ = filled(5)
    files = StoreSnapshot.begin([ShardSnapshots(shard)], NAMES, tmp_path, "cut-0").finish()
    path = tmp_path / files[ROWS.name][0].name
    good = path.read_bytes()
    assert len(good) == files[ROWS.name][0].nbytes
    for at in range(8, len(good) - 20, len(good) // 40):
        bad = bytearray(good)
        bad[at] ^= 4
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match="users"):
            for _ in TableReader([[path]]).contents():
                pass
    for size in (0, 5, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match="users"):
            TableReader([[path]])


def test_files_of_a_shard_that_does_not_see_the_folder_are_fetched(tmp_path: Path) -> None:
    shard, pusher = filled(5)
    snapshots, expected = ShardSnapshots(shard), state_of(shard)

    class Elsewhere:
        """A shard on another machine: it has no such folder."""

        def begin(self, request: SnapshotRequest) -> tuple[bool, str]:
            other = SnapshotRequest(request.tag, request.names, str(tmp_path / "not there"))
            return snapshots.begin(other)

        status, fetch, end = snapshots.status, snapshots.fetch, snapshots.end

    snapshot = StoreSnapshot.begin([Elsewhere()], NAMES, tmp_path, "cut-0")
    pusher.push()
    files = snapshot.finish()
    spool = snapshots._of("cut-0").folder
    assert spool != tmp_path and spool.is_dir()
    snapshot.end(good=True)
    assert not spool.exists()
    assert_same(restored(read([(tmp_path, files)])), expected)


def test_memory_of_a_snapshot_is_bounded(tmp_path: Path) -> None:
    """Counted in bytes of pieces and of the side buffer, under pushes of all rows."""
    shard, pusher = filled(40)
    side, request = 1 << 14, SnapshotRequest("cut-0", [ROWS.name], side_bytes=1 << 14)
    snapshots = ShardSnapshots(shard)
    snapshots.begin(request)
    cut = snapshots._of("cut-0")._tables[0].cut
    assert cut is not None
    while not snapshots.status("cut-0").done:
        pusher.push(n=4000)
    one = 4000 * (shard.table(ROWS.name).row_bytes + 24)  # type: ignore[union-attr]
    assert cut.peak_bytes <= max(side, one)
    assert snapshots.status("cut-0").failure == ""
    snapshots.end("cut-0", good=True)
