"""Step counter: ranks of one host claim parts of steps from one integer in memory that they share.

    number n  ->  part  n mod parts  of step  n // parts

A step has as many parts as there are ranks, and any rank may compute any part: a fast rank computes
more of them. A sync point is between two steps, never inside one. The first rank that is to sync,
at its limit or because of a request, fixes the sync point for all: the end of the step that has
begun. The first claim after a sync point waits until every rank has come to its own, so that no
rank trains while another one still evaluates or saves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

WORDS = 3  # int64: the next number, where to stop, and between which sync points that holds
_NEXT, _STOP, _SEGMENT = range(WORDS)


class SharedStepCounter:
    """One rank's view of the counter. `words`: `WORDS` zeros that all ranks share, `lock`: what
    only one rank is inside at a time, `meet()`: returns when every rank has called it."""

    def __init__(
        self,
        words: np.ndarray,
        parts: int,
        lock: AbstractContextManager[object],
        meet: Callable[[], None],
    ):
        self._words, self._parts, self._lock, self._meet = words, parts, lock, meet
        self._segment = 0  # sync points behind this rank, the start included
        self._at_sync = True

    def claim(self, limit: int) -> int | None:
        """The next number below `limit`, which is a whole number of steps; None: a sync point."""
        if self._at_sync:
            self._meet()
            self._at_sync, self._segment = False, self._segment + 1
        words = self._words
        with self._lock:
            # a request that was made before the last sync point is done with
            stop = int(words[_STOP]) if words[_SEGMENT] == self._segment else limit
            number = int(words[_NEXT])
            if number < min(limit, stop):
                words[_NEXT] = number + 1
                return number
            self._stop_here()
        self._at_sync = True
        return None

    def request_sync(self) -> None:
        """Let every rank's claims give None from the end of the current step on."""
        with self._lock:
            self._stop_here()

    def _stop_here(self) -> None:
        words, parts = self._words, self._parts
        if words[_SEGMENT] != self._segment:
            words[_STOP] = -(-int(words[_NEXT]) // parts) * parts
            words[_SEGMENT] = self._segment
