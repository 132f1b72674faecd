"""Checkpoints: one folder each, complete or absent, checked when read, free of code and of layout.

    checkpoints/step-00000120/tensors.safetensors     every tensor by name
                              tables/                 rows that servers wrote (see `table_files`)
                              manifest.json           their sha256 and size, round, metrics, ...

A background thread writes into a hidden folder, syncs and renames it: a crash at any moment leaves
the previous checkpoint and at worst a hidden folder, which the next save removes. A round that is
saved again gets a name beside its first checkpoint, whose place it then takes. Where the model
is split over ranks, they write the tensors together, each its own shards, before the thread does
the rest; the file is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from manyhands.core import (
    Group,
    Position,
    Snapshot,
    Tensors,
)
from manyhands.errors import CheckpointError, NotFinite
from manyhands.recover import sharded_file
from manyhands.recover.checked_files import check_file, digests_of, sync
from manyhands.recover.table_files import FILES, TABLES, SavingTables

FORMAT, PLAIN_FORMAT = 3, 2  # with table files, and without
TENSORS, MANIFEST, HIDDEN = "tensors.safetensors", "manifest.json", ".writing-"
LONG_S = 5.0  # for which training may wait for a disk without a word
NEW = ".new"  # ends the name of a second checkpoint of a round; sorts after the first one's

Report = Callable[[str, float, int, str], None]  # (event name, seconds, bytes, text)
Only = Callable[[str], bool]  # which tensors to read, by their names in the file
EVERYTHING: Only = lambda name: True
NOTHING: Only = lambda name: False


@dataclass
class RankSnapshot(Snapshot):
    """One rank's part of a snapshot of a model that is split over ranks.

    `tensors` are those of the file, the same on every rank; `mine` the shards of them that this
    rank writes. The dictionaries of `Snapshot` are empty.
    """

    tensors: sharded_file.Shapes = field(default_factory=dict)
    mine: list[sharded_file.TensorShard] = field(default_factory=list)


class Checkpoints:
    """Checkpoints of one run. The last `keep` stay, plus the best one by the metric `best`
    ("accuracy", or "-loss": a minus means smaller is better)."""

    def __init__(
        self, folder: Path, keep: int = 3, best: str | None = None, report: Report = lambda *_: None
    ):
        self.folder, self.keep, self.best, self.report = folder, keep, best, report
        self.last_good: Path | None = None
        self.failure = ""  # why the last save failed; "": it did not
        self.not_finite = ""  # the same, where it failed since something is NaN or infinite
        self._thread: threading.Thread | None = None

    # -- writing --

    def save(
        self,
        snapshot: Snapshot,
        metrics: dict[str, float],
        tables: SavingTables | None = None,
    ) -> None:
        """Save in the background: the snapshot's tensors must not change any more. One save at a
        time. `tables` are being written by servers."""
        self.wait()
        self._thread = threading.Thread(
            target=self._save, args=(snapshot, metrics, tables), name="checkpoint"
        )
        self._thread.start()

    def refuse(self, round: int, why: Exception) -> None:
        """There is nothing to save: report it as a save that failed."""
        self.wait()
        self._failed(round, None, time.perf_counter(), why)

    def room_for_tables(self, round: int) -> Path:
        """A hidden folder for the tables of the next checkpoint, when the one before is saved."""
        self.wait()
        self._sweep()
        return self.folder / f"{HIDDEN}{round}-{os.getpid()}-tables"

    def finish_last(self, round: int) -> None:
        """Before the snapshot of `round` is taken: memory may have room for one only."""
        start = time.perf_counter()
        self.wait()
        if (seconds := time.perf_counter() - start) > LONG_S:
            said = (
                f"training waited {seconds:.0f} s at round {round} for the checkpoint before to be "
                "written; save less often (save=), or to a faster disk"
            )
            self.report("notice", seconds, 0, said)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def save_together(
        self, snapshot: RankSnapshot, metrics: dict[str, float], group: Group, device: torch.device
    ) -> None:
        """Save the shards of all ranks. Every rank calls it; it returns when all tensors are on
        disk, and rank 0 does the rest in the background."""
        self.wait()
        start, hidden = time.perf_counter(), self.folder / f"{HIDDEN}{snapshot.round}-together"
        if group.rank == 0:
            self._sweep()
        try:
            sharded_file.write(
                hidden / TENSORS, snapshot.tensors, snapshot.mine, group, device=device
            )
        except CheckpointError as e:
            return self._failed(snapshot.round, hidden if group.rank == 0 else None, start, e)
        if group.rank == 0:
            self._thread = threading.Thread(
                target=self._finish, args=(snapshot, metrics, hidden, start), name="checkpoint"
            )
            self._thread.start()

    def _save(
        self, snapshot: Snapshot, metrics: dict[str, float], tables: SavingTables | None = None
    ) -> None:
        start, hidden = time.perf_counter(), self.folder / f"{HIDDEN}{snapshot.round}-{os.getpid()}"
        saved: Path | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep(None if tables is None else tables.folder)
            _write(snapshot, hidden)
            more = {} if tables is None else tables.finish(hidden)
        except Exception as e:  # a full disk must not stop training: the last good one stays
            self._failed(snapshot.round, hidden, start, e)
        else:
            saved = self._finish(snapshot, metrics, hidden, start, more)
        if tables is not None:
            tables.end(saved)

    def _finish(
        self,
        snapshot: Snapshot,
        metrics: dict[str, float],
        hidden: Path,
        start: float,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Path | None:
        """Write the manifest beside the tensors and give the folder its name; None: it failed."""
        try:
            path = self.path(snapshot.round)
            nbytes = _seal(snapshot, metrics, hidden, more)
            if path.exists():  # a resumed run came to this round again
                os.rename(hidden, new := path.with_name(f"{path.name}{NEW}"))
                sync(self.folder)  # before the old one goes
                self._take_place(new)
            else:
                os.rename(hidden, path)
            sync(self.folder)
            self.last_good, self.failure, self.not_finite = path, "", ""
            self._forget(path)
            self.report("checkpoint", time.perf_counter() - start, nbytes, str(path))
            return path
        except Exception as e:
            self._failed(snapshot.round, hidden, start, e)
            return None

    def _failed(self, round: int, hidden: Path | None, start: float, error: Exception) -> None:
        if hidden is not None:
            shutil.rmtree(hidden, ignore_errors=True)
        kept = (
            f"the last good one is {self.last_good}"
            if self.last_good
            else "there is no earlier one"
        )
        self.failure, self.not_finite = str(error) or type(error).__name__, ""
        if isinstance(error, NotFinite):
            self.not_finite = self.failure
        said = f"checkpoint at round {round} failed: {error}; training goes on, {kept}"
        self.report("checkpoint_failed", time.perf_counter() - start, 0, said)

    def _sweep(self, keep: Path | None = None) -> None:
        for old in self.folder.glob(f"{HIDDEN}*"):
            if old != keep:
                shutil.rmtree(old, ignore_errors=True)
        for new in self.folder.glob(f"step-*{NEW}"):
            self._take_place(new)

    def _take_place(self, new: Path) -> None:
        """Give a second checkpoint of a round the name of the first. It counts already: a crash on
        the way leaves it."""
        path = new.with_name(new.name.removesuffix(NEW))
        shutil.rmtree(path, ignore_errors=True)
        os.rename(new, path)
        if self.last_good == new:
            self.last_good = path

    def _forget(self, newest: Path) -> None:
        saved = self.all()
        # newer ones than that just written were damaged when this run resumed; they do not count
        keep = set([p for p in saved if p <= newest][-self.keep :])
        if (best := self.best_path()) is not None:
            keep.add(best)
        for path in saved:
            if path not in keep:
                shutil.rmtree(path, ignore_errors=True)

    def path(self, round: int) -> Path:
        return self.folder / f"step-{round:08d}"

    # -- reading --

    def all(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("step-*") if p.is_dir())

    def best_path(self) -> Path | None:
        if self.best is None:
            return None
        sign, name = (-1.0, self.best[1:]) if self.best.startswith("-") else (1.0, self.best)
        scored = []
        for path in self.all():
            with contextlib.suppress(CheckpointError):
                value = read_manifest(path)["metrics"].get(name)
                if value is not None and not math.isnan(value):
                    scored.append((sign * value, path))
        return max(scored)[1] if scored else None

    def latest(self, only: Only = EVERYTHING, check: bool = True) -> Snapshot | None:
        """The newest undamaged checkpoint, with `only` these tensors; damaged ones are reported."""
        found = self.all()
        for path in reversed(found):
            try:
                snapshot = load(path, only, check)
            except CheckpointError as e:
                self.report("warning", 0.0, 0, f"{e}; using the one before it")
                continue
            self.last_good = path
            return snapshot
        if found:
            raise CheckpointError(
                f"all {len(found)} checkpoints in {self.folder} are damaged; "
                "start anew without resume"
            )
        return None

    def reader(self) -> sharded_file.Reader:
        """A reader for shards of the tensors of the checkpoint that was loaded last."""
        assert self.last_good is not None
        return sharded_file.Reader(self.last_good / TENSORS)


def pick(run: Path, best: str | None = None) -> Snapshot:
    """The newest undamaged checkpoint of a run directory, or its best by a metric ("accuracy", or
    "-loss" for the smallest)."""
    return find(run, best)[1]


def find(
    run: Path, best: str | None = None, only: Only = EVERYTHING, check: bool = True
) -> tuple[Path, Snapshot]:
    """As `pick`, with `only` these tensors; and the checkpoint's folder. Without `check`, files
    are compared with their sizes only."""
    if best == "loss":
        raise CheckpointError("best=loss is the largest loss; give -loss, with a minus")
    folder = Checkpoints(run / "checkpoints", best=best)
    if best is not None and folder.all():
        if (path := folder.best_path()) is None:
            raise CheckpointError(
                f"no checkpoint of {run} knows the metric {best!r}; "
                "leave best out to take the newest"
            )
        return path, load(path, only, check)
    if (snapshot := folder.latest(only, check)) is None or folder.last_good is None:
        raise CheckpointError(
            f"{run} holds no checkpoint; a run directory that has saved at least once is needed"
        )
    return folder.last_good, snapshot


def load(path: Path, only: Only = EVERYTHING, check: bool = True) -> Snapshot:
    """Read and check one checkpoint. Nothing in the file is executed: tensors and JSON only.
    Without `check`, files are compared with their sizes only."""
    manifest = read_manifest(path)
    check_file(path, TENSORS, manifest, check)
    for name, saved in manifest.get(FILES, {}).items():
        check_file(path, name, saved, check)
    return read_tensors(path, manifest, only)


def read_tensors(path: Path, manifest: dict[str, Any], only: Only, known: str = "") -> Snapshot:
    """`known`: the kind of tensor of which those that are not read are on the meta device."""
    kinds: dict[str, Tensors] = {"model": {}, "optimizer": {}, "state": {}, "rng": {}, "ranks": {}}
    try:
        with safetensors.safe_open(path / TENSORS, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                kind, _, rest = name.partition("/")
                of_kind = kinds[kind]
                if only(name):
                    of_kind[rest] = tensors.get_tensor(name)
                elif kind == known:
                    shape = tensors.get_slice(name).get_shape()
                    of_kind[rest] = torch.empty(shape, device="meta")
    except (safetensors.SafetensorError, KeyError) as e:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {TENSORS} is not what this program writes ({e})"
        ) from e
    return Snapshot(
        manifest["round"],
        kinds["model"],
        kinds["optimizer"],
        kinds["state"],
        Position(**manifest["position"]),
        kinds["rng"],
        manifest["meta"],
        kinds["ranks"],
    )


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = (path / MANIFEST).read_text()
        manifest: dict[str, Any] = json.loads(text)
        own = manifest.pop("manifest_sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {MANIFEST} cannot be read ({type(e).__name__}: {e})"
        ) from e
    if own != _manifest_digest(manifest):
        raise CheckpointError(
            f"checkpoint {path} is damaged: {MANIFEST} does not match its own checksum"
        )
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {manifest['format']}, this version reads up to "
            f"{FORMAT}; update manyhands"
        )
    return manifest


def _write(snapshot: Snapshot, folder: Path) -> None:
    folder.mkdir()
    groups = {
        "model": snapshot.params,
        "optimizer": snapshot.optimizer,
        "state": snapshot.state,
        "rng": snapshot.rng,
        "ranks": snapshot.ranks,
    }
    save_file(
        {f"{kind}/{k}": v.contiguous() for kind, group in groups.items() for k, v in group.items()},
        folder / TENSORS,
    )


def _seal(
    snapshot: Snapshot, metrics: dict[str, float], folder: Path, more: Mapping[str, Any]
) -> int:
    """Write the manifest with the checksum of the tensors and `more`, and sync both; returns the
    bytes of all files."""
    file = folder / TENSORS
    manifest = {
        "format": FORMAT if more else PLAIN_FORMAT,
        "round": snapshot.round,
        "position": asdict(snapshot.position),
        "metrics": metrics,
        "meta": snapshot.meta,
        **digests_of(file),
        **more,
    }
    manifest["manifest_sha256"] = _manifest_digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    tables = [folder / TABLES] if more else []  # the files in it were synced when written
    for path in (file, folder / MANIFEST, *tables, folder):
        sync(path)
    return int(manifest["bytes"]) + sum(x["bytes"] for x in more.get(FILES, {}).values())


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
