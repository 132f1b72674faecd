"""Interruption: ends what a rank waits for in its groups, from another thread.

A rank that is lost need not be seen by those that wait: its host may be cut off, or it may hang.
Who knows that it is lost sets the interruption, and every wait of this rank raises PeerLost.

    shared memory    looks at `why` while it waits
    gloo             its sockets are shut down: gloo has no other way to end a call under way;
                     while it connects, it waits for others' addresses in the store
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from manyhands.errors import PeerLost

LOOK_S = 0.002


class Interruption:
    """Set once, by any thread; `why` is what the waiting rank then raises."""

    def __init__(self) -> None:
        self.why = ""
        self._actions: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def set(self, why: str) -> None:
        with self._lock:
            self.why = self.why or why
            actions, self._actions = self._actions, []
        for act in actions:
            act()

    def add(self, action: Callable[[], None]) -> None:
        """What ends a wait that does not look at `why`; called at once if it is set already."""
        with self._lock:
            if not self.why:
                self._actions.append(action)
                return
        action()

    def clear(self) -> None:
        """Before the groups close: their descriptors may be others' afterwards."""
        with self._lock:
            self._actions = []

    def check(self) -> None:
        if self.why:
            raise PeerLost(self.why)


def wait_for_keys(
    store: dist.Store, keys: list[str], timeout_s: float, interruption: Interruption | None
) -> None:
    """Wait until the store has all keys. Raises RuntimeError after `timeout_s`."""
    if interruption is None:
        store.wait(keys, timedelta(seconds=timeout_s))
        return
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        interruption.check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all keys were set within {timeout_s:g} s")
        time.sleep(LOOK_S)


class InterruptibleStore(dist.Store):
    """A rendezvous store for torch's own groups: the interruption ends their waits in it."""

    def __init__(self, store: dist.Store, timeout_s: float, interruption: Interruption):
        super().__init__()
        self._inner, self._timeout_s, self._interruption = store, timeout_s, interruption

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, value)  # type: ignore[arg-type]  # bytes are fine

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._inner.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        seconds = self._timeout_s if limit is None else limit.total_seconds()
        wait_for_keys(self._inner, keys, seconds, self._interruption)


def open_sockets() -> set[int]:
    """Descriptors of this process that are connected stream sockets, where the system lists
    them."""
    found = set()
    for name in _listed():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def _listed() -> Iterable[str]:
    folder = Path("/proc/self/fd")
    return os.listdir(folder) if folder.is_dir() else ()


def shut_down(descriptors: Iterable[int]) -> None:
    """End the connections; who waits for one of them is told that it is closed."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            if end.type == socket.SOCK_STREAM:
                end.getpeername()  # raises for a listening socket, which gloo does not expect
                end.shutdown(socket.SHUT_RDWR)
