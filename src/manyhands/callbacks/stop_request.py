"""Stop request: `run.stop(reason)` of one rank or several, beside the signals that end a run.

Ranks share it with their status, or right after an evaluation, so that all end at the same round.
"""

from __future__ import annotations

import torch

from manyhands.core import Group
from manyhands.trainer_parts import StopFlag

MOST_BYTES = 400  # of a reason that travels to the other ranks


class StopRequest:
    """Of one rank: what asked this process to stop."""

    def __init__(self, signals: StopFlag):
        self._signals = signals
        self.reason: str | None = None  # None: `ask` was not called

    def ask(self, reason: str) -> None:
        self.reason = reason if self.reason is None else self.reason

    @property
    def signal(self) -> int:
        """The number of the signal; 0: none."""
        return self._signals.requested

    @property
    def requested(self) -> int:
        """Not 0: a signal or `ask` wants the run to end."""
        return self.signal or int(self.reason is not None)


def agreed_reason(group: Group, device: torch.device, reason: str | None) -> str | None:
    """The reason of the first rank that has one; None: no rank has. Every rank calls it."""
    mine = 0 if reason is None else group.size - group.rank
    first = torch.tensor([mine], dtype=torch.int64, device=device)
    group.all_reduce({"stop": first}, op="max").wait()
    if not int(first):
        return None
    text = torch.zeros(MOST_BYTES, dtype=torch.int64)
    if reason is not None and mine == int(first):
        raw = reason.encode()[:MOST_BYTES]
        text[: len(raw)] = torch.tensor(list(raw), dtype=torch.int64)
    text = text.to(device)
    group.all_reduce({"reason": text}, op="max").wait()
    return bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")
