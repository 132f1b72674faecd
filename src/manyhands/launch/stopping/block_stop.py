"""Stop inside a block of local steps: all ranks end the block after the same number of steps.

Ranks are told to stop at different steps, and merging at the end of the block needs all of them.
Through the rendezvous store they agree on a step, once one of them has been told; until then a
local step costs a lock that nobody else holds, and nothing is exchanged.

    promise     how many steps of the block a rank will have done when it next could end the block.
                It does not go beyond before there is a decision.
    decision    the largest promise, once all ranks have given theirs: no rank is past it, all can
                reach it. Or, where a promise is late: to end the block as usual.

The first decision in the store holds (`compare_set`), so all ranks follow the same one.

Why no rank waits for ever: a thread gives the promise of a rank that cannot look itself, as it
computes a long step, or waits for the others in an exchange within the block (a fragment that is
merged, a layer that is split) or in the merge after it. A rank waits for threads, never for what
another rank's loop does next, and not for longer than `agree_s`. The thread also learns from the
store that another rank was told, so it is enough to tell one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

POLL_S = 0.25  # between two looks at the store, of up to RANKS ranks; with more, less often
RANKS = 400
WAIT_S = 0.01  # between two looks for a decision
TOLD = "stop/told"
AS_USUAL = 2**62


class Told(Protocol):
    """Whether this process was told to stop (`launch.signals.Stop`)."""

    @property
    def requested(self) -> int: ...


class BlockStop:
    """Of one rank; `store` is that of the run. Blocks follow each other: `begin`, `ends` after each
    step but the last, `over`. `name` gives the block that begins the same name on all ranks, and
    another one than to any before, also where a round is done again."""

    def __init__(
        self,
        stop: Told,
        store: dist.Store,
        rank: int,
        size: int,
        name: Callable[[], object],
        agree_s: float = 15.0,
    ) -> None:
        self.stop, self.store, self.rank, self.size = stop, store, rank, size
        self.name, self.agree_s = name, agree_s
        self.cut = False  # the last block was ended by a request; the same on all ranks
        self._lock = threading.Lock()
        self._block: object = ""
        self._reach = 0  # steps of this block after which this rank can end it next
        self._promise: int | None = None
        self._decision: int | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, most: int) -> None:
        with self._lock:
            self._block = self.name()
            self._reach, self._promise, self._decision, self.cut = 1, None, None, False
        if most > 1 and self.size > 1 and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="block stop", daemon=True)
            self._thread.start()

    def ends(self, done: int) -> bool:
        """Whether the block ends after `done` steps, on all ranks."""
        with self._lock:
            if self._promise is None and self.stop.requested:
                self._give(done)
            if self._promise is None:
                self._reach = done + 1
                return False
        if self._decision is None:
            self._decision = self._agree()
        with self._lock:
            self._reach = done + 1
        self.cut = done == self._decision
        return self.cut

    def over(self, done: int) -> None:
        """The block is over on this rank, which merges now: it cannot end it earlier any more."""
        with self._lock:
            self._reach = done

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # -- promises --

    def _key(self, what: object) -> str:
        return f"stop/{self._block}/{what}"

    def _give(self, promise: int) -> None:
        """With the lock: the loop must not pass this step meanwhile."""
        self._promise = promise
        if self.size > 1:
            self.store.set(self._key(self.rank), str(promise))
            self.store.set(TOLD, "")

    def _agree(self) -> int:
        assert self._promise is not None
        if self.size == 1:
            return self._promise
        decision, deadline = self._key("end"), time.monotonic() + self.agree_s
        promises = [self._key(rank) for rank in range(self.size)]
        while not self.store.check([decision]):
            if self.store.check(promises):
                found = max(int(self.store.get(key)) for key in promises)
            elif time.monotonic() > deadline:
                found = AS_USUAL
            else:
                time.sleep(WAIT_S)
                continue
            self.store.compare_set(decision, "", str(found))
        return int(self.store.get(decision))

    # -- the thread --

    def _watch(self) -> None:
        every = POLL_S * max(1.0, self.size / RANKS)
        try:
            while not self._closed.wait(every):
                if self._promise is None and (self.stop.requested or self.store.check([TOLD])):
                    with self._lock:
                        if self._promise is None:
                            self._give(self._reach)
        except RuntimeError:  # the store is gone, and so is the run
            return
