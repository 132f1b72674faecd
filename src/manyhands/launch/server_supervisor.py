"""Supervisor of servers: starts a server that died again, where others hold what it held.

It joins as a new server and gets copies; a coordinator goes on from the state that it kept, at the
same address. Not for ever: after RESTARTS deaths within WINDOW_S something is wrong for good.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from manyhands.errors import LaunchError
from manyhands.launch.server_child import Child, begin, end, spawn

LOOK_S = 0.05
RESTARTS, WINDOW_S = 10, 60.0


class ServerSupervisor:
    """Watches `children`, in place; `requests` is the configuration of each, by index."""

    def __init__(
        self, children: list[Child], requests: Mapping[int, dict[str, Any]], timeout_s: float
    ):
        self._children, self._requests, self._timeout_s = children, requests, timeout_s
        self.fates: list[str] = []  # how those ended that were started again
        self._deaths: list[float] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="server supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Start nothing any more."""
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            for at, child in enumerate(list(self._children)):
                if not child.alive and not self._closing.is_set():
                    if not self._allowed():
                        return
                    self._children[at] = self._again(child)

    def _allowed(self) -> bool:
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if now - t < WINDOW_S] + [now]
        if len(self._deaths) <= RESTARTS:
            return True
        _say(f"{len(self._deaths)} servers died within {WINDOW_S:g} s: no more are started")
        return False

    def _again(self, child: Child) -> Child:
        fate = child.fate()
        self.fates.append(fate)
        fresh = spawn(child.index)
        _say(f"{fate.splitlines()[0]}; started again as pid {fresh.process.pid}")
        end([child])
        # beside: another may die while this one starts
        threading.Thread(
            target=self._begin, args=(fresh,), name="server start", daemon=True
        ).start()
        return fresh

    def _begin(self, child: Child) -> None:
        try:
            begin(child, self._requests[child.index], time.monotonic() + self._timeout_s)
        except LaunchError as e:
            if not self._closing.is_set():
                _say(str(e))


def _say(text: str) -> None:
    print(f"manyhands: {text}", file=sys.stderr, flush=True)
