"""Keeper: what a coordinator asks of the place that keeps its state, whichever place it is.

A claim makes this process the only coordinator of the run and gives it a `term`, larger than that
of every coordinator before. A save that returned is kept. A save of a process that has lost its
claim raises Fenced and changes nothing.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod

from manyhands.errors import Fenced, MembershipError, RunBusy

RETRY_S = 0.05
LONGEST_NAME = 200


class Keeper(ABC):
    """Claim and state of one run. A keeper claims once; all of its methods may be called by any
    thread.

    `term`   the number of this claim, larger than all before; 0 before the claim
    `lost`   set when the claim was lost against our will; stop coordinating then
    """

    def __init__(self, run: str):
        self.run = run
        self.term = 0
        self.lost = threading.Event()
        self._why_lost = ""
        self._pid = 0  # of the process that claimed: a fork of it holds nothing
        self._closed = False
        self._lock = threading.RLock()
        self._losing = threading.Lock()  # not _lock: a save may be waiting for an answer under it

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the state is kept, as messages name it."""

    def claim(self, who: str, wait_s: float = 0.0) -> None:
        """Become the run's only coordinator, or raise RunBusy, which names the one that is.

        `wait_s`: how long to try again, for the claim of a dead process to end.
        """
        with self._lock:
            if self._pid or self._closed:
                raise MembershipError(
                    f"this keeper of run {self.run!r} has been used for a claim before; open "
                    "another for another claim"
                )
            deadline = time.monotonic() + wait_s
            while True:
                try:
                    self._claim(described(who))
                    break
                except RunBusy:
                    left = deadline - time.monotonic()
                    if left <= 0 or self._closed:
                        raise
                    time.sleep(min(RETRY_S, left))
            self._pid = os.getpid()

    def check(self) -> None:
        """Raise Fenced unless this process holds the claim, as far as it can know by itself.

        `save` calls it. Call it before an answer for which nothing is saved.
        """
        if not self._pid:
            raise MembershipError(f"nothing was claimed of run {self.run!r}; call claim first")
        if self._closed:
            raise Fenced(f"this process gave up its claim on run {self.run!r}; claim it anew")
        if self._pid != os.getpid():
            raise Fenced(
                f"process {self._pid} claimed run {self.run!r}, and this is process "
                f"{os.getpid()}, a fork of it; only the one that claimed may save"
            )
        if not self.lost.is_set() and (why := self._ended()):
            self._lose(why)
        if self.lost.is_set():
            raise Fenced(self._why_lost)

    def save(self, state: bytes) -> None:
        """Keep `state` in place of what was kept before; when this returns, it is kept."""
        with self._lock:
            self.check()
            self._save(state)

    @abstractmethod
    def load(self) -> bytes | None:
        """The state that was saved last, by any coordinator; None where none ever was."""

    @abstractmethod
    def close(self) -> None:
        """Give the claim up at once. The state stays."""

    # -- what a back end does --

    @abstractmethod
    def _claim(self, who: str) -> None:
        """Claim and set `term`, or raise RunBusy."""

    @abstractmethod
    def _ended(self) -> str:
        """Why the claim has ended, by what this process sees without asking; "" while it holds."""

    @abstractmethod
    def _save(self, state: bytes) -> None: ...

    def _lose(self, why: str) -> None:
        with self._losing:
            if not self.lost.is_set():
                self._why_lost = (
                    f"this process (term {self.term}) no longer coordinates run {self.run!r}: "
                    f"{why}. Nothing was saved. End this process; the coordinator that is there "
                    "now goes on from the last state that was saved"
                )
                self.lost.set()

    def _busy(self, holder: str, when_dead: str) -> RunBusy:
        return RunBusy(
            f"run {self.run!r} has a coordinator already, as {self.place} says: "
            f"{holder or 'a process that has not given its name yet'}. A run has one coordinator: "
            f"stop that process, or give this run another name. {when_dead}"
        )

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def described(who: str) -> str:
    """`who` in one line, and which process of which host that is."""
    line = " ".join(who.split())[:LONGEST_NAME] or "unnamed"
    return f"{line} (pid {os.getpid()} on {socket.gethostname()})"
