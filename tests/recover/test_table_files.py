"""Table files of checkpoints: whole by themselves, whatever is forgotten, killed or damaged."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.assembly.tables import saved_readers
from manyhands.core import Position, Snapshot, Table, Tensors
from manyhands.errors import CheckpointError
from manyhands.recover.checkpoint import Checkpoints, load
from manyhands.recover.table_files import TableFiles
from manyhands.server.client.server_store import ServerStore
from manyhands.server.local_store import LocalStore
from support.servers import joined, process

ROWS = Table("rows", dim=4, optimizer="adagrad", options={"lr": 0.1})
OTHER = Table("other/rows", dim=2, optimizer="sgd")
NAMES = [ROWS.name, OTHER.name]


class Run:
    """A store, its checkpoints, and what was reported of them."""

    def __init__(self, folder: Path, store: LocalStore | ServerStore, **words: Any):
        self.store, self.reports = store, list[tuple[str, str]]()
        report = lambda name, seconds, nbytes, text: self.reports.append((name, text))
        keep = words.pop("keep", 3)
        self.checkpoints = Checkpoints(folder, keep=keep, report=report)
        self.files, self.round = TableFiles(**words), 0
        for table in (ROWS, OTHER):
            store.create(table)

    def push(self, n: int, ids: int = 4000) -> None:
        g = torch.Generator().manual_seed(self.round * 1000 + n)
        some = torch.randint(0, ids, (n,), generator=g)
        rows = {"rows": some, "other/rows": some}
        grads = {"rows": torch.randn(n, 4, generator=g), "other/rows": torch.ones(n, 2)}
        self.store.push(rows, grads).wait()

    def save(self, before_it_ends: Any = lambda: None) -> dict[str, Tensors]:
        """Save a checkpoint of the next round; returns what it must hold."""
        self.round += 1
        expected = {name: self.store.dump(name) for name in NAMES}
        room = self.checkpoints.room_for_tables(self.round)
        saving = self.files.begin(self.store, NAMES, room, self.round)
        before_it_ends()
        none: Tensors = {}
        snapshot = Snapshot(self.round, {"w": torch.ones(3)}, none, none, Position())
        self.checkpoints.save(snapshot, {}, saving)
        self.checkpoints.wait()
        return expected


def read(path: Path) -> dict[str, Tensors]:
    load(path)
    return {
        name: {k: torch.from_numpy(x) for k, x in reader.whole().items()}
        for name, reader in saved_readers(path).items()
    }


def same(a: dict[str, Tensors], b: dict[str, Tensors]) -> bool:
    return a.keys() == b.keys() and all(
        a[t].keys() == b[t].keys() and all(torch.equal(a[t][k], b[t][k]) for k in a[t]) for t in a
    )


def tags(path: Path) -> set[str]:
    return {p.name.rsplit(".", 2)[1] for p in (path / "tables").iterdir()}


def test_an_increment_holds_all_it_adds_to_whatever_is_forgotten(tmp_path: Path) -> None:
    run = Run(tmp_path, LocalStore(), keep=1, incremental=True)
    run.push(8000)
    layers = []
    for _ in range(12):
        expected = run.save(lambda: run.push(300))
        (path,) = run.checkpoints.all()  # the others are forgotten
        assert same(read(path), expected), run.reports
        layers.append(len(tags(path)))
    assert layers[:3] == [1, 2, 3]
    assert 1 in layers[3:], "a full one when increments have become half as large"
    assert not list(tmp_path.glob(".writing*"))


def test_without_hard_links_every_checkpoint_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links on this disk")

    monkeypatch.setattr(os, "link", refuse)
    run = Run(tmp_path, LocalStore(), incremental=True)
    for _ in range(3):
        run.push(200)
        expected = run.save()
    last = run.checkpoints.all()[-1]
    assert same(read(last), expected) and len(tags(last)) == 1


def test_a_damaged_table_file_is_named_and_the_checkpoint_before_used(tmp_path: Path) -> None:
    run = Run(tmp_path, LocalStore(), incremental=True)
    run.push(500)
    first = run.save()
    run.push(500)
    run.save()
    before, last = run.checkpoints.all()
    own = [p for p in (last / "tables").iterdir() if p.stat().st_nlink == 1 and "other" in p.name]
    (file,) = own
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file.name}.*checksum"):
        load(last)
    found = run.checkpoints.latest()
    assert found is not None and found.round == 1 and same(read(before), first)
    file.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match=rf"{file.name} has 100 bytes"):
        load(last)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{file.name} cannot be read"):
        load(last)


def test_a_save_that_fails_leaves_the_one_before_and_the_next_adds_to_it(tmp_path: Path) -> None:
    run = Run(tmp_path, LocalStore(), incremental=True)
    run.push(1000)
    run.save()

    def remove() -> None:
        (hidden,) = tmp_path.glob(".writing*")
        shutil.rmtree(hidden)

    run.push(100)
    run.save(remove)
    assert run.reports[-1][0] == "checkpoint_failed" and "step-00000001" in run.reports[-1][1]
    assert [p.name for p in run.checkpoints.all()] == ["step-00000001"]
    run.push(100)
    expected = run.save()
    last = run.checkpoints.all()[-1]
    assert run.reports[-1][0] == "checkpoint" and same(read(last), expected)
    assert len(tags(last)) == 2
    assert not list(tmp_path.glob(".writing*"))


def test_a_server_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with (
        process(shards=1, servers=1, workers=1) as (server, address),
        joined(address, timeout_s=5.0) as store,
    ):
        run = Run(tmp_path, store, incremental=True)
        run.push(50_000, ids=100_000)
        expected = run.save()
        run.push(20_000, ids=100_000)
        run.save(lambda: os.kill(server.pid, signal.SIGKILL))
        assert "failed" in run.reports[-1][0] and address in run.reports[-1][1]
    found = run.checkpoints.latest()
    assert found is not None and found.round == 1 and run.checkpoints.last_good is not None
    assert not list(tmp_path.glob(".writing*"))
    with process(shards=3) as (_, address), joined(address) as store:
        again = Run(tmp_path, store)
        for name, reader in saved_readers(run.checkpoints.last_good).items():
            store.restore_pieces(name, reader.contents())
        assert same({name: store.dump(name) for name in NAMES}, expected)
        again.round = 1
        after = again.save(lambda: again.push(100))
        assert same(read(again.checkpoints.all()[-1]), after)
