"""A forked rank, as the launcher holds it: as much of subprocess.Popen as a launcher needs.

The launcher is not its parent. It holds a pidfd, to wait for it and to send it signals, and one end
of a socket of the rank's own, its channel. On that come, in whole messages:

    {"pid": 17}      and the pidfd, from the fork server: the rank lives, in a session of its own
    {"left": 0}      from the rank: it is about to leave with this exit code
    {"status": 9}    from the fork server, as waitpid told it: the rank has ended
    {"refused": ""}  from the fork server: it cannot fork, and why

What a rank said itself counts only where the fork server is gone. Without that word a rank that
ends after its fork server counts as killed.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import IO, Any

MESSAGE_BYTES = 4096
STATUS_S = 5.0  # for the status of a rank that has ended; a fork server answers within milliseconds


class NotForked(Exception):
    """The fork server gave no rank; the text says why."""


class ForkedRank:
    """`server`: a pidfd of the fork server, readable once that is gone."""

    def __init__(self, channel: socket.socket, server: int, stdin: int, stdout: int | None):
        self._channel, self._server = channel, server
        self.pid, self.pidfd = -1, -1
        self.returncode: Any = None  # as that of Popen: of one that has ended, a number
        self._left: int | None = None
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] | None = None if stdout is None else os.fdopen(stdout, "rb")

    def begin(self, timeout_s: float) -> None:
        """Wait until the rank lives; raises NotForked where it does not."""
        self._hear(timeout_s, lambda: self.pid > 0)
        if self.pid < 0:
            self.give_up()
            gone = multiprocessing.connection.wait([self._server], 0.0)
            raise NotForked("it has ended" if gone else f"no answer within {timeout_s:g} s")

    def give_up(self) -> None:
        """Close all: a rank that the fork server still forks ends at once, by its pipe."""
        for each in (self.stdin, self.stdout, self._channel):
            if each is not None:
                each.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def poll(self) -> int | None:
        if self.returncode is not None:
            return int(self.returncode)
        self._hear(0.0, lambda: self.returncode is not None)
        if self.returncode is None and multiprocessing.connection.wait([self.pidfd], 0.0):
            self._hear(STATUS_S, lambda: self.returncode is not None)
            if self.returncode is None:  # the fork server is gone
                self.returncode = -signal.SIGKILL if self._left is None else self._left
        if self.returncode is not None:
            self._channel.close()
            os.close(self.pidfd)
            self.pidfd = -1
        return None if self.returncode is None else int(self.returncode)

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None and not multiprocessing.connection.wait([self.pidfd], timeout):
            raise subprocess.TimeoutExpired(f"rank (pid {self.pid})", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                pass  # it ended meanwhile

    def _hear(self, timeout_s: float, heard: Callable[[], bool]) -> None:
        """Take messages until `heard()`, at most for this time, or until no more can come."""
        until = time.monotonic() + timeout_s
        while not heard():
            left = max(0.0, until - time.monotonic())
            found = multiprocessing.connection.wait([self._channel, self._server], left)
            if self._channel in found:
                if not self._take():
                    return
            else:  # nothing within this time, or nothing more from a fork server that is gone
                return

    def _take(self) -> bool:
        """One message; False: nobody is left to send any."""
        try:
            data, fds, _, _ = socket.recv_fds(
                self._channel, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        if not data:
            return False
        said = json.loads(data)
        if "refused" in said:
            self.give_up()
            raise NotForked(said["refused"])
        if "pid" in said:
            self.pid, self.pidfd = said["pid"], fds[0]
        self._left = said.get("left", self._left)
        if "status" in said:
            self.returncode = os.waitstatus_to_exitcode(said["status"])
        return True
