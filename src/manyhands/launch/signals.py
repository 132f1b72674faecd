"""Graceful stop: SIGTERM or Ctrl-C saves a checkpoint first; a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Stop:
    """While active, a signal sets `requested` instead of ending the process; the loop checks it."""

    def __init__(self, interrupt: bool = True):
        self.requested: int = 0  # the signal's number
        self._signals = [signal.SIGTERM, *([signal.SIGINT] if interrupt else [])]
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        # only the main thread may handle signals; in others (of a notebook) nothing changes
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._on_signal) for s in self._signals}
            outer = [
                h.__self__
                for h in self._before.values()
                if isinstance(getattr(h, "__self__", None), Stop)
            ]
            # a request that came before this one was entered
            self.requested = next((o.requested for o in outer if o.requested), self.requested)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = number
