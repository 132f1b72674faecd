"""Loop ends: ranks whose own loops make different numbers of steps.

    begun      steps that a rank has begun; published once some rank's loop is over
    over       its loop is over, after so many
    waits      it waits for all ranks, in run.sum or run.merged

A rank whose loop is over still takes part in the steps that others make, without samples, until the
last loop is over: an exchange needs every rank. So it must know whether another rank has begun a
further step. As long as no loop is over nobody publishes anything, and a step costs a lock that
nobody else holds. A thread learns from the rendezvous store that one is, and answers for a rank
whose loop is inside an exchange.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from manyhands.errors import TaskError

POLL_S = 0.25  # between two looks at the store, of a rank in its loop
WAIT_S = 0.005  # of one whose loop is over
KEY = "own loop"
BEGUN, OVER, WAITS = "begun", "over", "waits"


class LoopEnds:
    """Of one rank; `store` is that of the run. Steps are counted from the run's start."""

    def __init__(self, store: dist.Store, rank: int, size: int, steps: int):
        self._store, self._rank, self._size = store, rank, size
        self.steps = steps  # begun by this rank
        self._waits = ""  # for all ranks, in this call
        self._told = False  # that some rank's loop is over
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop ends", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        with self._lock:
            self.steps += 1
            self._publish()

    @contextmanager
    def waiting(self, call: str) -> Iterator[None]:
        """Inside, this rank waits for all others outside of a step."""
        with self._lock:
            self._waits = call
            self._publish()
        try:
            yield
        finally:
            with self._lock:
                self._waits = ""
                self._publish()

    def follow(self, step: Callable[[], bool]) -> None:
        """This rank's loop is over: take part in the others' steps by `step`, which says whether
        the run goes on, until all loops are over."""
        with self._lock:
            self._told = True
            self._put(OVER)
        while True:
            found = [self._state(rank) for rank in range(self._size)]
            most = max(steps for _, steps, _ in found)
            if most > self.steps:
                self.steps += 1
                if not step():
                    return
                continue
            if all(kind == OVER for kind, *_ in found):
                return
            for rank, (kind, _, call) in enumerate(found):
                if kind == WAITS:
                    raise TaskError(
                        f"rank {rank} waits for all ranks in {call}, but the loop of rank "
                        f"{self._rank} is over after {self.steps} steps; call it on every rank as "
                        "often, or end the loops of all ranks at the same step"
                    )
            time.sleep(WAIT_S)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    # -- the store --

    def _publish(self) -> None:
        """With the lock."""
        if self._told:
            self._put(WAITS if self._waits else BEGUN)

    def _put(self, kind: str) -> None:
        text = f"{kind}/{self.steps}/{self._waits}"
        self._store.set(f"{KEY}/{self._rank}", text)
        if kind == OVER:
            self._store.set(f"{KEY}/{OVER}", "")

    def _state(self, rank: int) -> tuple[str, int, str]:
        """What a rank has published last; steps of -1: nothing yet."""
        key = f"{KEY}/{rank}"
        if not self._store.check([key]):
            return "", -1, ""
        kind, steps, call = bytes(self._store.get(key)).decode().split("/", 2)
        return kind, int(steps), call

    def _watch(self) -> None:
        try:
            while not self._closed.wait(POLL_S):
                if self._store.check([f"{KEY}/{OVER}"]):
                    with self._lock:
                        if not self._told:
                            self._told = True
                            self._publish()
                    return
        except RuntimeError:  # the store is gone, and so is the run
            return
