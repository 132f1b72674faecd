"""Shared memory segments: files in /dev/shm that several processes of one host map.

A segment is unlinked as soon as all processes have mapped it, so nothing is left behind however
they end. Only a kill between making and unlinking leaves a file; `sweep` removes those whose maker
is dead.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

from manyhands.errors import LaunchError

PREFIX = "manyhands-"
_numbers = itertools.count()


def directory() -> Path:
    shm = Path("/dev/shm")
    # macOS has no /dev/shm: an unlinked temporary file that all map does the same
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def create(nbytes: int) -> tuple[Path, mmap.mmap]:
    """A new segment of `nbytes` zeros; the caller unlinks the path when all peers have attached."""
    path = directory() / f"{PREFIX}{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # reserve the pages now: running out of memory later would be a SIGBUS instead of this error
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
        return path, mmap.mmap(fd, nbytes)
    except OSError as e:
        path.unlink()
        free = os.statvfs(path.parent)
        raise OSError(
            e.errno,
            f"shared memory: {_size(nbytes)} needed, "
            f"{_size(free.f_bavail * free.f_frsize)} free in {path.parent}; "
            "enlarge it (docker: --shm-size) or set link=gloo",
        ) from e
    finally:
        os.close(fd)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def attach(path: Path | str, nbytes: int) -> mmap.mmap:
    """Map a segment of another rank. Its path came over the rendezvous, to which others may write:
    only a file that a process of this user has made as a segment is touched."""
    path = Path(path)
    if path.parent != directory() or not path.name.startswith(PREFIX):
        raise _foreign(path)
    fd = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        found = os.fstat(fd)
        private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
        if found.st_uid != os.geteuid() or not private or found.st_size < nbytes:
            raise _foreign(path)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _foreign(path: Path) -> LaunchError:
    return LaunchError(
        f"the rendezvous names {path} as shared memory of a rank, but a file "
        f"{directory() / PREFIX}* of this user is needed: somebody else writes to the rendezvous; "
        "start again on another port"
    )


def sweep(makers: Collection[int] | None = None) -> list[str]:
    """Remove segments of this user whose maker is no longer alive; returns their names. `makers`:
    only theirs, because processes of another container may share the directory but not be seen."""
    gone = []
    for path in directory().glob(f"{PREFIX}*-*-*"):
        pid = path.name.removeprefix(PREFIX).split("-")[0]
        if not pid.isdigit() or (makers is not None and int(pid) not in makers):
            continue
        if not alive(int(pid)):
            with contextlib.suppress(PermissionError):
                path.unlink(missing_ok=True)
                gone.append(path.name)
    return gone


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # a killed process whose parent has not collected it yet still answers signals
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return os.name != "posix" or not Path("/proc/self").exists()
