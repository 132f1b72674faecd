"""Run directory: all files of one run (plan, events, checkpoints, pictures); one live owner."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from manyhands.errors import CheckpointError, RunBusy

try:
    import fcntl
except ImportError:  # Windows: no advisory locks; two runs in one directory are not noticed there
    fcntl = None  # type: ignore[assignment]

OWNER = "owner"  # the lock file
PLAN = "plan.toml"
WORDS = "words.txt"
SCRIPT = "script.json"
WRITTEN = (OWNER, PLAN, WORDS, SCRIPT, "events", "curves.png")  # by every run, besides checkpoints


def choose(base: Path, name: str, directory: str | None, resume: bool) -> Path:
    """A new directory, the given one, or, to resume, the newest of this name."""
    if directory is not None:
        path = Path(directory)
        _check_given(path)
        if not resume and (path / "checkpoints").exists():
            if _is_run_directory(path):
                claim(path).close()  # raises if a live run uses it: the better message
            raise RunBusy(
                f"{path} holds an earlier run; resume it (--resume), or give another directory"
            )
        if resume and not path.exists():
            raise CheckpointError(
                f"there is no run to resume in {path}: the directory does not exist"
            )
        return path
    if resume:
        # `lenet-*` would match runs of lenet-big too
        stamped = re.compile(re.escape(name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
        found = [
            (m, p)
            for p in base.glob("*/")
            if (m := stamped.fullmatch(p.name)) and (p / "checkpoints").exists()
        ]
        earlier = sorted((m[1], int(m[2] or 1), p) for m, p in found)
        if not earlier:
            raise CheckpointError(
                f"there is no run of {name!r} to resume in {base}/; "
                "give its directory with --dir, or start anew without --resume"
            )
        return earlier[-1][-1]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, n = base / f"{name}-{stamp}", 1
    while path.exists():
        n += 1
        path = base / f"{name}-{stamp}-{n}"
    return path


def _check_given(path: Path) -> None:
    """The directory that the user gave is one, and a run writes over nothing of the user's in it.

    Raises CheckpointError or RunBusy."""
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"{path} is a file, and a run needs a directory; give another one with --dir"
        )
    if _is_run_directory(path) or (path / "checkpoints").exists():  # a run, or what is left of one
        return
    if found := [name for name in WRITTEN if (path / name).exists()]:
        raise RunBusy(
            f"{path} is not a run directory but holds {', '.join(found)}, which a run would write "
            "over; give an empty or a new directory with --dir"
        )


def _is_run_directory(path: Path) -> bool:
    """Whether `claim` has made the lock file there: a user's own `owner` says something else."""
    try:
        with (path / OWNER).open() as file:
            return re.fullmatch(r"(pid \d+)?", file.read(64).strip()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def write_plan(path: Path, plan: str, words: str) -> None:
    """Keep the resolved plan; and the plan as it was given, without defaults, for `read_words`."""
    try:
        (path / PLAN).write_text(plan)
        (path / WORDS).write_text(words + "\n")
    except OSError as e:
        raise _unusable(path, e) from e


def read_words(path: Path) -> str:
    """The plan as the run in `path` was given it; "": none, or a run of an older version."""
    try:
        return (path / WORDS).read_text().strip()
    except OSError:
        return ""


def write_script(path: Path, script: str, arguments: Sequence[str]) -> None:
    """Keep which script the run trains, for those who come after it."""
    try:
        said = {"script": script, "arguments": list(arguments)}
        (path / SCRIPT).write_text(json.dumps(said) + "\n")
    except OSError as e:
        raise _unusable(path, e) from e


def read_script(path: Path) -> tuple[str, tuple[str, ...]]:
    """The script that the run in `path` trains, and its arguments; "": it is not known."""
    try:
        said = json.loads((path / SCRIPT).read_text())
        return str(said["script"]), tuple(map(str, said["arguments"]))
    except (OSError, ValueError, KeyError, TypeError):
        return "", ()


def is_held(handle: IO[str], path: Path) -> bool:
    """Whether the lock file of `path` is still the one that `handle`, of `claim`, has open."""
    try:
        there = (path / OWNER).stat()
    except OSError:
        return False
    here = os.fstat(handle.fileno())
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def claim(path: Path) -> IO[str]:
    """Lock the directory until the returned handle is closed or this process ends, in any way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = (path / OWNER).open("a+")
    except OSError as e:
        raise _unusable(path, e) from e
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            handle.close()
            raise RunBusy(
                f"{path} is in use by a live run ({owner}); "
                "wait for it, stop it, or give another directory"
            ) from None
    try:
        handle.seek(0)
        handle.truncate()
        handle.write(f"pid {os.getpid()}")
        handle.flush()
    except OSError as e:
        with contextlib.suppress(OSError):  # to close is to flush again
            handle.close()
        raise _unusable(path, e) from e
    return handle


def _unusable(path: Path, error: OSError) -> CheckpointError:
    why = error.strerror or str(error)
    return CheckpointError(
        f"the run directory {path} cannot be made or written ({why}); "
        "free space or permit writing there, or give another directory with --dir"
    )
