"""Keeper in a directory: a locked file is the claim, a `StateFile` beside it has the state.

    <directory>/<run>.claim      flock of the coordinator; its term and name, for others to read
    <directory>/<run>.state.0    the state, in two slots
    <directory>/<run>.state.1

The kernel ends a lock with the process that holds it, however that process ends, so a claim is
never lost and never outlives its holder: there is no time in this file. It is for coordinators
that would run on one machine, or on several whose shared file system has locks that work.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from pathlib import Path
from urllib.parse import quote

from manyhands.errors import MembershipError
from manyhands.membership.keeper import Keeper
from manyhands.membership.state_file import StateFile

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# a lock is shared with forked children, and would live on in them when its process is killed
_live: weakref.WeakSet[FileKeeper] = weakref.WeakSet()


class FileKeeper(Keeper):
    """`directory` is made where it is not there; `fsync`: saves survive loss of power."""

    def __init__(self, directory: str, run: str, *, fsync: bool = False):
        super().__init__(run)
        folder, name = Path(directory), quote(run, safe="")
        self._claim_path = folder / f"{name}.claim"
        self._state = StateFile(folder / f"{name}.state", fsync)
        self._handle: int | None = None
        self._inode = (0, 0)
        _live.add(self)

    @property
    def place(self) -> str:
        return str(self._claim_path)

    def load(self) -> bytes | None:
        try:
            with self._lock:
                content = self._state.read()
        except OSError as e:
            raise self._unusable(e) from e
        return content.state if content is not None else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._handle is not None and self._pid in (0, os.getpid()):
                try:
                    _write_line(self._handle, self.term, "")
                except OSError:
                    pass  # the name only tells others who holds the claim
            self._release()

    def _claim(self, who: str) -> None:
        try:
            self._claim_path.parent.mkdir(parents=True, exist_ok=True)
            while not self._locked():
                pass
            assert self._handle is not None
            before, _ = _read_line(self._handle)
            content = self._state.open()
            # also after the state was deleted: the claim file still knows the last term
            self.term = max(before, content.term) + 1
            _write_line(self._handle, self.term, who)
            self._state.write(self.term, content.state)
        except OSError as e:
            self._release()
            raise self._unusable(e) from e
        except MembershipError:
            self._release()
            raise

    def _locked(self) -> bool:
        """Lock the claim file; False where it was replaced meanwhile. Raises RunBusy."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._handle = handle = os.open(self._claim_path, flags, 0o644)
        try:
            if fcntl is None:
                raise OSError(errno.ENOTSUP, "this operating system has no flock")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _, holder = _read_line(handle)
            self._release()
            raise self._busy(holder, "Its claim ends with it, also by kill -9.") from None
        except OSError as e:
            self._release()
            raise MembershipError(
                f"the file system of {self._claim_path} gives no locks ({e.strerror}); a lock "
                "makes sure that a run has one coordinator. Give a directory on a local disk, or "
                "etcd://host:port"
            ) from e
        status = os.fstat(handle)
        self._inode = (status.st_dev, status.st_ino)
        if self._ended():
            self._release()
            return False
        return True

    def _ended(self) -> str:
        try:
            status = os.stat(self._claim_path)
        except OSError:
            return f"its claim {self._claim_path} was deleted"
        if (status.st_dev, status.st_ino) != self._inode:
            return f"its claim {self._claim_path} was deleted, and made anew by another process"
        return ""

    def _save(self, state: bytes) -> None:
        try:
            self._state.write(self.term, state)
        except OSError as e:
            raise self._unusable(e) from e

    def _release(self) -> None:
        """Ends the lock, unless this is a fork of its process: then only our share of it."""
        self._state.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _unusable(self, error: OSError) -> MembershipError:
        return MembershipError(
            f"the state of run {self.run!r} cannot be read or written beside "
            f"{self._claim_path} ({error.strerror or error}); the state saved last is as it was. "
            "Free space or permit writing there, or give another directory"
        )


def _read_line(handle: int) -> tuple[int, str]:
    """Term and name of a claim file; 0 and "" where it has none."""
    term, _, who = (
        os.pread(handle, 4096, 0).decode(errors="replace").partition("\n")[0].partition(" ")
    )
    return (int(term) if term.isascii() and term.isdigit() else 0), who


def _write_line(handle: int, term: int, who: str) -> None:
    # one write, and the line before is cut off after it: never a file without a term
    line = f"{term} {who}\n".encode()
    os.pwrite(handle, line, 0)
    os.ftruncate(handle, len(line))


def _forked() -> None:
    for keeper in list(_live):
        keeper._lock = threading.RLock()  # another thread of the parent may have held it
        keeper._release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
