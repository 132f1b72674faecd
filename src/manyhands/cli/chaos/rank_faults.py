"""Faults of ranks: a slow process, a host that is cut off, what outlives a launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from manyhands.exchange import segments
from manyhands.launch import environment, lab
from manyhands.launch.hosts import Host

CYCLE_S = 0.1  # of stop and go
ENDS_S = 2.0  # after its launcher every process of a run must be gone
LOOK_S = 0.01


class SlowProcess:
    """A process that computes only 1/factor of the time: stopped and continued in turn, by a
    thread."""

    def __init__(self, pid: int, factor: float):
        self._pid, self._go_s = pid, CYCLE_S / factor
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._slow, name="chaos slow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """As fast as before, from here on."""
        self._over.set()
        self._thread.join()

    def _slow(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            try:
                while not self._over.is_set():
                    os.kill(self._pid, signal.SIGSTOP)
                    self._over.wait(CYCLE_S - self._go_s)
                    os.kill(self._pid, signal.SIGCONT)
                    self._over.wait(self._go_s)
            finally:
                os.kill(self._pid, signal.SIGCONT)


def lab_hosts() -> list[Host]:
    """Of the lab that this command runs in; none outside."""
    described = environment.lab()
    return lab.read(described)[0] if described else []


def cut_host(host: Host) -> Callable[[], None] | None:
    """Take a host's link down; returns what puts it up again, or None: it could not be done."""

    def link(state: str) -> bool:
        command = [*host.enter, "ip", "link", "set", lab.CARD, state]
        return subprocess.run(command, capture_output=True).returncode == 0

    def restore() -> None:
        link("up")

    return restore if link("down") else None


def outlived(pids: Sequence[int]) -> list[str]:
    """What is left of processes whose launcher was killed, as sentences; those that still run are
    ended."""
    deadline = time.monotonic() + ENDS_S
    while any(map(segments.alive, pids)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    found = []
    if running := [pid for pid in pids if segments.alive(pid)]:
        named = ", ".join(map(str, running))
        found.append(f"{ENDS_S:g} s after the launcher was killed, these still ran: pid {named}")
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    memory = segments.directory()
    if left := [p.name for pid in pids for p in memory.glob(f"{segments.PREFIX}{pid}-*")]:
        found.append(f"left in {memory} after the launcher was killed: {', '.join(left)}")
    return found
