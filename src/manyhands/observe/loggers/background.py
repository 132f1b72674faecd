"""Background sink: a thread of its own writes, so that training waits for no network.

A logger that fails is dropped with one message, and one that does not end in time is left behind.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

from manyhands.core import Event
from manyhands.observe.events import Sink, say

CLOSE_S = 30.0  # for the last numbers to be written when the run is over


class BackgroundSink:
    """Background sink: hands events to another sink in a thread."""

    def __init__(self, name: str, sink: Sink, close_s: float = CLOSE_S):
        self._name, self._sink, self._close_s = name, sink, close_s
        self._events: queue.SimpleQueue[list[Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed = False

    def write(self, events: list[Event]) -> None:
        if self._failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"log {self._name}")
            self._thread.daemon = True  # one that hangs must not keep the process
            self._thread.start()
        self._events.put(events)

    def close(self) -> None:
        if self._thread is None:
            return
        self._events.put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            say(f"log={self._name} did not end within {self._close_s:.0f} s; it is left behind")
        self._thread = None

    def _work(self) -> None:
        try:
            while (events := self._events.get()) is not None:
                self._sink.write(events)
            self._sink.close()
        except Exception as e:
            self._failed = True
            with suppress(Exception):
                self._sink.close()
            text = " ".join(f"{type(e).__name__}: {e}".split())
            say(f"log={self._name} stopped ({text:.300}); training goes on without it")
