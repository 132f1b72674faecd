"""Late answers: pushes of a connection that wait for their copies while the next ones are applied.

A thread sends each answer when all servers of the chain have its change. Where that cannot be any
more, it ends the connection: the worker then sends everything without an answer to the server that
leads, which knows what was applied.
"""

from __future__ import annotations

import threading
from collections import deque

from manyhands.server.protocol import messages as m
from manyhands.server.protocol.frame import Channel, Closed
from manyhands.server.replication.replicator import NotLeading, Replicator


class LateAnswers:
    """Whoever else sends over the channel calls `drain` first."""

    def __init__(self, channel: Channel, replicator: Replicator):
        self._channel, self._replicator = channel, replicator
        self._todo: deque[tuple[int, m.Message, int]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = self._broken = False

    def add(self, change: int, answer: m.Message, number: int) -> None:
        """Send `answer` to request `number` when the change is acknowledged."""
        with self._changed:
            self._todo.append((change, answer, number))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="manyhands-answers", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when all answers are sent."""
        if not self._todo and not self._broken:  # nearly always
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._todo or self._broken)
            if self._broken:
                raise Closed("another server leads this shard now")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._closed)
                if self._closed:
                    return
                change, answer, number = self._todo[0]
            try:
                self._replicator.wait(change)
                self._channel.send(answer, number)
            except (NotLeading, OSError):
                with self._changed:
                    self._broken = True
                    self._changed.notify_all()
                self._channel.stop()
                return
            with self._changed:
                self._todo.popleft()
                self._changed.notify_all()
