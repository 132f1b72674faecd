"""Epochs of slot maps: (term, number), so that a new coordinator's map always wins.

A coordinator counts `number`; the keeper of its claim gave it `term`. One that was cut off and
comes back has an old term, and servers refuse what it sends, whatever its number.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from manyhands.errors import Fenced


class MapEpoch(NamedTuple):
    """Ordered by term, then by number."""

    term: int
    number: int

    def next(self, term: int) -> MapEpoch:
        """The epoch after this one, made by the coordinator of `term`."""
        if term < self.term:
            raise Fenced(
                f"a coordinator of term {term} would follow epoch {self.number} of term "
                f"{self.term}; a later one coordinates this run now: end this process"
            )
        return MapEpoch(term, self.number + 1)


class EpochFence:
    """The newest epoch that a member has seen; older ones are refused."""

    def __init__(self) -> None:
        self._newest = MapEpoch(0, 0)
        self._lock = threading.Lock()

    @property
    def newest(self) -> MapEpoch:
        with self._lock:
            return self._newest

    def admit(self, epoch: MapEpoch) -> bool:
        """Whether `epoch` is new; False for the newest again. Raises Fenced for an older one."""
        with self._lock:
            if epoch < self._newest:
                raise Fenced(
                    f"epoch {epoch.number} of term {epoch.term} came after epoch "
                    f"{self._newest.number} of term {self._newest.term}: its sender does not "
                    "coordinate this run any more, or the message was late"
                )
            new = epoch > self._newest
            self._newest = epoch
            return new
