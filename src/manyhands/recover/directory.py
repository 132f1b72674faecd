"""Run directory: all files of one run (plan, events, checkpoints, pictures); one live owner."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import IO

from manyhands.errors import CheckpointError, RunBusy

try:
    import fcntl
except ImportError:  # Windows: no advisory locks; two runs in one directory are not noticed there
    fcntl = None  # type: ignore[assignment]


def choose(base: Path, name: str, directory: str | None, resume: bool) -> Path:
    """A new directory, the given one, or, to resume, the newest of this name."""
    if directory is not None:
        path = Path(directory)
        if not resume and (path / "checkpoints").exists():
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


def claim(path: Path) -> IO[str]:
    """Lock the directory until the returned handle is closed or this process ends, in any way."""
    path.mkdir(parents=True, exist_ok=True)
    handle = (path / "owner").open("a+")
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
    handle.seek(0)
    handle.truncate()
    handle.write(f"pid {os.getpid()}")
    handle.flush()
    return handle
