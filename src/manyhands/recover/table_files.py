"""Table files of a checkpoint: written by the servers themselves, full ones and increments.

    step-00000120/tables/users.<tag>.<shard>        one file for each table, snapshot and shard

An increment holds the rows that changed since the snapshot before it, and adds to its files. These
are hard links in the folder of the new checkpoint: each checkpoint is complete by itself, and
nothing is lost when an older one is forgotten. Where the disk has no hard links, or when increments
have become half as large as the full snapshot, the next one is full. What is in the files is the
servers' business; here they have names, sizes and digests.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.core import TableSnapshot, TableStore

TABLES = "tables"  # the folder, and what the manifest calls them
FILES = "files"  # of the manifest: sizes and digests

Digests = dict[str, dict[str, Any]]  # file -> bytes, sha256


@dataclass
class _Layer:
    """The files of one snapshot, by table."""

    tag: str
    round: int
    files: dict[str, list[str]]
    digests: Digests

    @property
    def nbytes(self) -> int:
        return sum(int(x["bytes"]) for x in self.digests.values())


class TableFiles:
    """The table files of one run, from checkpoint to checkpoint."""

    def __init__(self, incremental: bool = False):
        self.incremental = incremental
        self._layers: list[_Layer] = []  # of the last good checkpoint
        self._folder: Path | None = None  # where their files are

    def begin(
        self, store: TableStore, names: Sequence[str], folder: Path, round: int
    ) -> SavingTables:
        """Begin to save tables into `folder`, a hidden one, while nobody pushes."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tag = f"{round:08d}-{secrets.token_hex(4)}"
        layers = self._linked(names, folder)
        base = layers[-1].tag if layers else ""
        try:
            snapshot = store.snapshot(names, folder, tag, base, self.incremental)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if base and not snapshot.base:  # a shard does not know what it would add to
            _unlink(folder, layers)
            layers = []
        return SavingTables(self, snapshot, folder, tag, round, layers)

    def _linked(self, names: Sequence[str], folder: Path) -> list[_Layer]:
        """Link the files that an increment may add to; [] where it has to be a full snapshot."""
        layers, old = self._layers, self._folder
        if not self.incremental or not layers or old is None:
            return []
        full, *increments = layers
        if sum(x.nbytes for x in increments) > full.nbytes / 2 or list(full.files) != list(names):
            return []
        try:
            for layer in layers:
                for name in layer.digests:
                    os.link(old / name, folder / name)
        except OSError:  # no hard links here, or the checkpoint is gone
            _unlink(folder, layers)
            return []
        return list(layers)

    def keep(self, layers: list[_Layer], folder: Path) -> None:
        self._layers, self._folder = layers, folder


def _unlink(folder: Path, layers: list[_Layer]) -> None:
    for layer in layers:
        for name in layer.digests:
            (folder / name).unlink(missing_ok=True)


@dataclass
class SavingTables:
    """Tables that servers are writing into `folder` for one checkpoint."""

    _of: TableFiles
    _snapshot: TableSnapshot
    folder: Path
    tag: str
    round: int
    _layers: list[_Layer] = field(default_factory=list)  # that it adds to

    @property
    def full(self) -> bool:
        return not self._layers

    def finish(self, checkpoint: Path) -> dict[str, Any]:
        """Wait until all is written and move it into the checkpoint's folder; returns what the
        manifest says of it.
        """
        files = {name: list(of_shards) for name, of_shards in self._snapshot.finish().items()}
        digests: Digests = {
            name: {"bytes": nbytes, "sha256": sha256}
            for of_shards in files.values()
            for name, nbytes, sha256 in of_shards
        }
        names = {table: [name for name, _, _ in of_shards] for table, of_shards in files.items()}
        self._layers = [*self._layers, _Layer(self.tag, self.round, names, digests)]
        os.rename(self.folder, checkpoint / TABLES)
        return {
            TABLES: {
                table: [
                    {"tag": x.tag, "round": x.round, "files": x.files[table]} for x in self._layers
                ]
                for table in names
            },
            FILES: {f"{TABLES}/{k}": v for x in self._layers for k, v in x.digests.items()},
        }

    def end(self, checkpoint: Path | None) -> None:
        """The checkpoint has its name now, or None: it was given up."""
        if checkpoint is not None:
            self._of.keep(self._layers, checkpoint / TABLES)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._snapshot.end(good=checkpoint is not None)


def table_layers(path: Path, manifest: Mapping[str, Any]) -> dict[str, list[list[Path]]]:
    """The files of each table of a checkpoint, by layer, the full one first."""
    return {
        name: [[path / TABLES / file for file in layer["files"]] for layer in layers]
        for name, layers in manifest.get(TABLES, {}).items()
    }
