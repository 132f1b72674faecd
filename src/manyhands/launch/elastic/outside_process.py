"""Outside process: a rank that somebody else has started, as the elastic launcher sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO


class OutsideProcess:
    """As much of subprocess.Popen as a launcher needs. `here`: it runs on this machine; of others
    only heartbeats tell whether they live."""

    def __init__(self, pid: int, here: bool, born: str):
        self.pid, self._here, self._born = pid, here, born
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.finished = False  # it said that it has done everything

    def poll(self) -> int | None:
        gone = self._here and birth_of(self.pid) != self._born
        if self.returncode is None and (gone or (self.finished and not self._here)):
            self.returncode = 0 if self.finished else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        limit = time.monotonic() + (5.0 if timeout is None else timeout)
        while self.poll() is None and self._here:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 5.0)
            time.sleep(0.01)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        if self._here and self.poll() is None:
            os.kill(self.pid, number)

    def give_up(self) -> None:
        """End it here; of one on another machine, only its seat is taken."""
        self.send_signal(signal.SIGKILL)
        if not self._here:
            self.returncode = -signal.SIGKILL


def birth_of(pid: int) -> str:
    """When a process of this machine was started, by the kernel's clock: a number may be given
    again. "": there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        return ""
