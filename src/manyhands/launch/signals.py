"""Graceful stop: a signal or a notice of preemption saves a checkpoint first.

SIGTERM, SIGUSR1 (Slurm sends it some time before a job's limit), Ctrl-C, and a file that appears.
A second Ctrl-C stops at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from manyhands.errors import PlanError

LOOK_S = 1.0  # between two looks for the file: it may be on a network file system


class Stop:
    """While active, a signal sets `requested` instead of ending the process; the loop checks it.

    `preempt_file` is a file whose appearance counts as SIGTERM."""

    def __init__(self, interrupt: bool = True, preempt_file: str | None = None):
        numbers = [signal.SIGTERM, signal.SIGUSR1, *([signal.SIGINT] if interrupt else [])]
        self._requested, self.notice = 0, ""  # `notice`: by what, for people
        self._signals, self._file = numbers, preempt_file
        self._next_look = 0.0
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> int:
        """The signal's number; 0: nobody has asked."""
        if self._file is not None and not self._requested:
            self._look(self._file)
        return self._requested

    def __enter__(self) -> Stop:
        # only the main thread may handle signals; in others (of a notebook) nothing changes
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._on_signal) for s in self._signals}
            # a request that came before this one was entered
            for outer in self._outer():
                if outer._requested and not self._requested:
                    self._requested, self.notice = outer._requested, outer.notice
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for outer in self._outer():  # who started this one must not go on with the next
            if self._requested and not outer._requested:
                outer._requested, outer.notice = self._requested, self.notice
        for number, before in self._before.items():
            self._unlink(number, before)
        self._before = {}

    def _unlink(self, number: int, before: Any) -> None:
        """Stops may end in another order than they began: runs in the cells of a notebook."""
        owner = getattr(signal.getsignal(number), "__self__", None)
        if owner is self:
            signal.signal(number, before)
            return
        while isinstance(owner, Stop) and number in owner._before:
            inner, owner = owner, getattr(owner._before[number], "__self__", None)
            if owner is self:
                inner._before[number] = before
                return

    def _outer(self) -> list[Stop]:
        owners = [getattr(handler, "__self__", None) for handler in self._before.values()]
        return [owner for owner in owners if isinstance(owner, Stop)]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested, self.notice = number, signal.Signals(number).name

    def _look(self, file: str) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        if os.path.exists(file):
            self._requested, self.notice = signal.SIGTERM, f"the file {file} (preempt_file)"


def refuse_present(preempt_file: str | None) -> None:
    """A file that is there before the run would stop it at its first round."""
    if preempt_file is not None and os.path.exists(preempt_file):
        raise PlanError(
            f"preempt_file={preempt_file} exists already, but its appearance is to tell the run to "
            "stop; remove it, or give another path"
        )
