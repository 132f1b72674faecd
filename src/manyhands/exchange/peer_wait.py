"""Peer wait: how a rank waits for flags of its peers in shared memory and notices dead peers.

A rank spins for a moment, giving the core away each time, then sleeps ever longer and checks that
the peers it waits for are alive. It does not spin longer: a rank that spins slows the one it waits
for, where both share a physical core.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np

from manyhands.errors import PeerLost
from manyhands.exchange import segments
from manyhands.exchange.interruption import Interruption

SPINS = 20


class Fence:
    """Memory fence: all writes before the call are visible to other processes before any after it.

    x86 keeps stores in order; elsewhere a flag could overtake the data it announces. Releasing a
    lock and taking it again orders all earlier writes before all later ones on every machine that
    we know.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            pass
        with self._lock:
            pass


class PeerWait:
    """`pids` is shared: every rank's process, 0 once it has closed its group. `progress` moves what
    this rank still has to send or receive: a peer may need it before it can do what we wait for.
    `interruption` may end the wait."""

    def __init__(
        self,
        rank: int,
        pids: np.ndarray,
        timeout_s: float,
        fence: Fence,
        progress: Callable[[], None],
        interruption: Interruption | None = None,
    ):
        self._rank, self._pids, self._timeout_s = rank, pids, timeout_s
        self._fence, self._progress = fence, progress
        self._interruption = Interruption() if interruption is None else interruption

    def __call__(
        self, ready: Callable[[], bool], absent: Callable[[], list[int]], what: str
    ) -> None:
        """Return when `ready()`. `absent` lists the ranks this one waits for, `what` says in
        what."""
        for _ in range(SPINS):
            if ready():
                self._fence()
                return
            self._progress()
            os.sched_yield()
        start, nap_s, looked = time.monotonic(), 20e-6, 0.0
        while not ready():
            self._interruption.check()
            self._progress()
            time.sleep(nap_s)
            waited = time.monotonic() - start
            nap_s = 20e-6 if waited < 0.02 else min(nap_s * 1.2, 0.5e-3)
            if waited - looked > 0.1:
                looked = waited
                self._check_peers(absent, what, waited, ready)
        self._fence()

    def _check_peers(
        self, absent: Callable[[], list[int]], what: str, waited_s: float, ready: Callable[[], bool]
    ) -> None:
        pids = {r: int(self._pids[r]) for r in absent()}
        gone = {r for r, pid in pids.items() if not pid or not segments.alive(pid)}
        # ask again: a rank may have come, done its part and left between the two questions
        if gone and not ready() and (lost := sorted(gone & set(absent()))):
            died = [r for r in lost if pids[r]]  # a rank that closed did so because of these
            how = (
                f"rank {died[0]} (pid {pids[died[0]]}) died"
                if died
                else f"rank {lost[0]} closed its group"
            )
            raise PeerLost(
                f"{how}; rank {self._rank} was waiting for it in {what}", tuple(died or lost)
            )
        if waited_s > self._timeout_s:
            late = absent()
            raise PeerLost(
                f"ranks {late} (pids {[int(self._pids[r]) for r in late]}) are alive but did not "
                f"come to {what} in {waited_s:.0f} s, where rank {self._rank} waits; look at what "
                "they are doing (py-spy dump) or raise timeout_s",
                tuple(late),
            )
