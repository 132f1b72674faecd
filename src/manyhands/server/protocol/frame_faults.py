"""Frame faults: frames to servers are delayed, or sent twice, on purpose (`manyhands chaos`).

Only frames with rows are sent twice: their pushes carry sequence numbers, so that a shard applies
none twice, and an answer that nobody awaits is dropped. Frames then go through sockets: what a
server does a second time in shared memory could fall into memory that is used again.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from manyhands.server.protocol import messages as m


@dataclass
class FrameFaults:
    """`duplicate` is the share of frames that are sent twice."""

    delay_s: float = 0.0
    duplicate: float = 0.0
    random: random.Random = field(default_factory=random.Random)
    delayed: int = 0  # so far
    repeated: int = 0

    def wait(self) -> None:
        if self.delay_s:
            self.delayed += 1
            time.sleep(self.delay_s)

    def repeats(self, message: m.Message) -> bool:
        """Whether a frame is sent a second time. Not one that makes the shard remember what it
        sends: remembered later, it would be something else."""
        if not isinstance(message, m.Exchange) or message.remember:
            return False
        twice = self.random.random() < self.duplicate
        self.repeated += twice
        return twice


_installed: list[FrameFaults] = []


def install(faults: FrameFaults | None) -> None:
    """Of all connections that this process makes from now on; None: none."""
    _installed[:] = [] if faults is None else [faults]


def installed() -> FrameFaults | None:
    return _installed[0] if _installed else None
