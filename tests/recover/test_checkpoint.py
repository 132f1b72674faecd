"""A checkpoint is complete or absent, checked when read, and reading it runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.core import Snapshot
from manyhands.errors import CheckpointError
from manyhands.recover import checkpoint
from manyhands.recover.checked_files import digest_of
from manyhands.recover.checkpoint import (
    HIDDEN,
    MANIFEST,
    TENSORS,
    Checkpoints,
    load,
)
from support.paths import TESTS
from support.snapshots import snapshot


def assert_equal(a: Snapshot, b: Snapshot) -> None:
    assert (a.round, a.position, a.meta) == (b.round, b.position, b.meta)
    for kind in ("params", "optimizer", "state", "rng"):
        ours, theirs = getattr(a, kind), getattr(b, kind)
        assert ours.keys() == theirs.keys()
        for k in ours:
            assert ours[k].dtype == theirs[k].dtype and torch.equal(ours[k], theirs[k]), k


class Said(list[tuple[str, str]]):
    def __call__(self, name: str, seconds: float, nbytes: int, text: str) -> None:
        self.append((name, text))


def saved(folder: Path, rounds: list[int], **options: Any) -> tuple[Checkpoints, Said]:
    said = Said()
    checkpoints = Checkpoints(folder, report=said, **options)
    for round in rounds:
        checkpoints.save(snapshot(round), {"accuracy": round / 100, "loss": 1 / round})
    checkpoints.wait()
    return checkpoints, said


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    _, said = saved(tmp_path, [7])
    assert said == [("checkpoint", str(tmp_path / "step-00000007"))]
    again = Checkpoints(tmp_path)
    got = again.latest()
    assert got is not None and again.last_good == tmp_path / "step-00000007"
    assert_equal(got, snapshot(7))


def test_saving_happens_in_the_background_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real, running = threading.Event(), checkpoint._write, []

    def slow(*arguments: Any) -> int:
        running.append(1)
        assert len(running) == 1, "two saves at once"
        go.wait()
        running.pop()
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "_write", slow)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(1), {})  # returns though nothing is written
    assert not list(tmp_path.glob("step-*"))
    go.set()
    checkpoints.save(snapshot(2), {})
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_before_a_snapshot_is_taken_the_last_one_is_on_disk_and_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real, said = threading.Event(), checkpoint._write, Said()

    def slow(*arguments: Any) -> Any:
        assert go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "_write", slow)
    monkeypatch.setattr(checkpoint, "LONG_S", 0.0)
    checkpoints = Checkpoints(tmp_path, report=said)
    held = snapshot(1)
    alive = [weakref.ref(v) for v in held.params.values()]
    checkpoints.save(held, {})
    del held
    assert all(ref() is not None for ref in alive), "it is still to be written"
    threading.Timer(0.05, go.set).start()
    checkpoints.finish_last(2)
    assert go.is_set() and names(tmp_path) == ["step-00000001"]
    assert not any(ref() is not None for ref in alive), "nobody holds it when the next is taken"
    assert [text for name, text in said if name == "notice"] == [
        "training waited 0 s at round 2 for the checkpoint before to be written; save less often "
        "(save=), or to a faster disk"
    ]


def test_the_last_k_stay_and_the_best_by_a_metric_too(tmp_path: Path) -> None:
    saved(tmp_path / "last", [1, 2, 3, 4, 5], keep=2)
    assert names(tmp_path / "last") == ["step-00000004", "step-00000005"]
    for best, kept in (("accuracy", 3), ("-loss", 2)):
        folder = tmp_path / best
        checkpoints = Checkpoints(folder, keep=1, best=best)
        for round, accuracy, loss in (
            (1, 0.1, 0.9),
            (2, 0.2, 0.1),
            (3, 0.9, 0.5),
            (4, 0.5, 0.3),
            (5, float("nan"), float("nan")),
        ):
            checkpoints.save(snapshot(round), {"accuracy": accuracy, "loss": loss})
        checkpoints.wait()
        assert names(folder) == [f"step-0000000{kept}", "step-00000005"]
        assert checkpoints.best_path() == folder / f"step-0000000{kept}"


def test_a_round_without_metrics_is_never_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, best="accuracy")
    checkpoints.save(snapshot(1), {})
    checkpoints.save(snapshot(2), {"accuracy": 0.1})
    checkpoints.save(snapshot(3), {})
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


# -- damage --


def truncate(path: Path) -> None:
    file = path / TENSORS
    os.truncate(file, file.stat().st_size // 2)


def flip(path: Path, name: str = TENSORS, at: int = -5) -> None:
    raw = bytearray((path / name).read_bytes())
    raw[at] ^= 1
    (path / name).write_bytes(raw)


DAMAGE = {
    "truncated tensors": (truncate, "tensors.safetensors has .* bytes, the manifest says"),
    "flipped bit": (flip, r"tensors.safetensors has checksum .*\.\.\., the manifest says"),
    "flipped bit in the header": (lambda p: flip(p, at=20), "tensors.safetensors has checksum"),
    "no tensors": (lambda p: (p / TENSORS).unlink(), "tensors.safetensors cannot be read"),
    "truncated manifest": (
        lambda p: os.truncate(p / MANIFEST, 100),
        "manifest.json cannot be read",
    ),
    "empty manifest": (lambda p: os.truncate(p / MANIFEST, 0), "manifest.json cannot be read"),
    "no manifest": (lambda p: (p / MANIFEST).unlink(), "manifest.json cannot be read"),
    "changed manifest": (
        lambda p: (p / MANIFEST).write_text(
            (p / MANIFEST).read_text().replace('"global_batch": 32', '"global_batch": 33')
        ),
        "manifest.json does not match its own checksum",
    ),
    "a manifest that is a list": (
        lambda p: (p / MANIFEST).write_text("[1]"),
        "manifest.json cannot be read",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used_with_a_notice(
    tmp_path: Path, kind: str
) -> None:
    damage, says = DAMAGE[kind]
    saved(tmp_path, [1, 2, 3])
    damage(tmp_path / "step-00000003")
    with pytest.raises(CheckpointError, match=f"step-00000003 is damaged: {says}"):
        load(tmp_path / "step-00000003")
    said = Said()
    checkpoints = Checkpoints(tmp_path, report=said)
    got = checkpoints.latest()
    assert (
        got is not None and got.round == 2 and checkpoints.last_good == tmp_path / "step-00000002"
    )
    ((name, text),) = said
    assert (
        name == "warning"
        and "step-00000003 is damaged" in text
        and text.endswith("using the one before it")
    )


def test_several_damaged_ones_are_passed_over_and_when_none_is_whole_that_is_an_error(
    tmp_path: Path,
) -> None:
    saved(tmp_path, [1, 2, 3])
    flip(tmp_path / "step-00000003")
    truncate(tmp_path / "step-00000002")
    said = Said()
    got = Checkpoints(tmp_path, report=said).latest()
    assert got is not None and got.round == 1 and len(said) == 2
    flip(tmp_path / "step-00000001", MANIFEST, 40)
    with pytest.raises(
        CheckpointError, match=r"all 3 checkpoints in .* are damaged; start anew without resume"
    ):
        Checkpoints(tmp_path).latest()
    assert Checkpoints(tmp_path / "none").latest() is None


def test_after_a_resume_past_damaged_ones_they_take_no_good_ones_place(tmp_path: Path) -> None:
    saved(tmp_path, [10, 20, 30])
    truncate(tmp_path / "step-00000030")
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest().round == 20  # type: ignore[union-attr]
    checkpoints.save(snapshot(25), {})
    checkpoints.wait()
    got = Checkpoints(tmp_path).latest()
    assert (
        got is not None
        and got.round == 25
        and checkpoints.last_good is not None
        and checkpoints.last_good.exists()
    )


def test_a_newer_format_says_to_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PLAIN_FORMAT", 99)
    saved(tmp_path, [1])
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match="has format 99, this version reads up to 3; update manyhands"
    ):
        load(tmp_path / "step-00000001")


# -- crashes --


def test_a_crash_before_the_rename_leaves_the_previous_one_and_the_next_save_sweeps_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, [1])
    half = tmp_path / f"{HIDDEN}2-999"
    half.mkdir()
    (half / TENSORS).write_bytes(b"half of it")
    assert Checkpoints(tmp_path).latest().round == 1  # type: ignore[union-attr]
    saved(tmp_path, [2])
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


CRASH = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.snapshots import snapshot
from manyhands.recover import checkpoint
at = {at!r}
real = getattr(os, at)
def crash(*a, **k):
    if any({match!r} in str(x) for x in a): os._exit(9)
    return real(*a, **k)
checkpoints = checkpoint.Checkpoints(Path({folder!r}), keep=1)
checkpoints.save(snapshot(1), {{}})
checkpoints.wait()
setattr(os, at, crash)
checkpoints.save(snapshot(2), {{}})
checkpoints.wait()
"""


@pytest.mark.parametrize(("at", "match"), [("rename", "step-00000002"), ("open", "manifest.json")])
def test_a_process_that_dies_while_saving_loses_nothing_that_was_saved(
    tmp_path: Path, at: str, match: str
) -> None:
    code = CRASH.format(tests=str(TESTS), at=at, match=match, folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    got = Checkpoints(tmp_path).latest()
    assert got is not None
    assert_equal(got, snapshot(1))


def test_a_round_that_is_saved_again_replaces_its_first_checkpoint(tmp_path: Path) -> None:
    checkpoints, said = saved(tmp_path, [1, 2])
    checkpoints.save(snapshot(2, seed=7), {})
    checkpoints.wait()
    assert [name for name, _ in said] == ["checkpoint"] * 3
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    got = Checkpoints(tmp_path).latest()
    assert got is not None
    assert_equal(got, snapshot(2, seed=7))


class Crash(BaseException):
    """The process dies here: no handler of the package catches it."""


class Calls(list[tuple[str, ...]]):
    """Every real rename, sync and removal, in order, until the call `crash_at` (from 0)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, crash_at: int | None = None):
        super().__init__()
        self.crash_at = crash_at
        named = lambda fd: os.readlink(f"/proc/self/fd/{fd}")
        for module, name in ((os, "rename"), (os, "fsync"), (os, "unlink"), (shutil, "rmtree")):
            monkeypatch.setattr(module, name, self._recorded(name, getattr(module, name), named))

    def _recorded(self, name: str, real: Any, named: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            if len(self) == self.crash_at:
                raise Crash
            paths = [named(p) if isinstance(p, int) else str(p) for p in given[:2]]
            self.append((name, *(Path(p).name for p in paths if not isinstance(p, bool))))
            return real(*given, **options)

        return call


def test_nothing_is_named_before_it_is_on_disk_and_nothing_removed_before_its_successor_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, _ = saved(tmp_path, [1], keep=1)
    with monkeypatch.context() as patched:
        calls = Calls(patched)
        checkpoints._save(snapshot(2), {})
    hidden, first, second = f"{HIDDEN}2-{os.getpid()}", "step-00000001", "step-00000002"
    assert [c for c in calls if c[0] != "unlink"] == [
        ("fsync", TENSORS),
        ("fsync", MANIFEST),
        ("fsync", hidden),
        ("rename", hidden, second),
        ("fsync", tmp_path.name),
        ("rmtree", first),
    ]
    with monkeypatch.context() as patched:
        calls = Calls(patched)
        checkpoints._save(snapshot(2, seed=7), {})
    assert [c for c in calls if c[0] != "unlink"][3:] == [
        ("rename", hidden, f"{second}.new"),
        ("fsync", tmp_path.name),
        ("rmtree", second),
        ("rename", f"{second}.new", second),
        ("fsync", tmp_path.name),
    ]


def test_a_crash_at_any_call_while_a_round_is_saved_again_leaves_one_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, crash_at = set(), 0
    while True:
        folder = tmp_path / str(crash_at)
        checkpoints, _ = saved(folder, [2], keep=1)
        with monkeypatch.context() as patched:
            calls = Calls(patched, crash_at)
            try:
                checkpoints._save(snapshot(2, seed=7), {})
            except Crash:
                pass
            else:
                break
        again = Checkpoints(folder, keep=1)
        got = again.latest()
        assert got is not None, calls
        new = torch.equal(got.params["b"], snapshot(2, seed=7).params["b"])
        assert_equal(got, snapshot(2, seed=7 if new else 0))
        assert again.last_good is not None
        assert_equal(load(again.last_good, check=False), got)
        found.add(new)
        again.save(snapshot(2, seed=8), {})
        again.wait()
        assert names(folder) == ["step-00000002"] and again.last_good == folder / "step-00000002"
        crash_at += 1
    assert found == {False, True} and crash_at == len(calls) > 8


def test_a_full_disk_leaves_the_last_good_one_and_is_said(tmp_path: Path) -> None:
    """The limit on a file's size stands in for the disk: writing fails at the same call with the
    same kind of error.
    """
    checkpoints, said = saved(tmp_path, [1])
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        checkpoints.save(snapshot(2, numel=100_000), {})
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    name, text = said[-1]
    assert name == "checkpoint_failed"
    assert text.startswith("checkpoint at round 2 failed: ") and text.endswith(
        f"training goes on, the last good one is {tmp_path}/step-00000001"
    )
    assert names(tmp_path) == ["step-00000001"]
    checkpoints.save(snapshot(3, numel=100_000), {})  # space again
    checkpoints.wait()
    assert Checkpoints(tmp_path).latest().round == 3  # type: ignore[union-attr]


# -- code in files --


class _Evil:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_code_in_a_checkpoint_file_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    saved(tmp_path / "c", [1, 2])
    path = tmp_path / "c" / "step-00000002"
    (path / TENSORS).write_bytes(pickle.dumps(_Evil(mark)))
    torch.save({"x": _Evil(mark)}, path / "model.pt")
    # with a manifest that vouches for it, as somebody who can write the folder can make one
    manifest = {
        "format": 1,
        "round": 2,
        "position": {"epoch": 0, "offset": 0, "steps": 2},
        "metrics": {},
        "meta": {},
        "sha256": digest_of(path / TENSORS),
        "bytes": (path / TENSORS).stat().st_size,
    }
    manifest["manifest_sha256"] = checkpoint._manifest_digest(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    said = Said()
    got = Checkpoints(tmp_path / "c", report=said).latest()
    assert not mark.exists()
    assert got is not None and got.round == 1 and "step-00000002 is damaged" in said[0][1]
