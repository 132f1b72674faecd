"""Restart budget: whether, and after which pause, what has failed may be started again.

    budget      at most `most` restarts within `window_s`; older ones do not count
    pause       0 or 1 s, then 2, 4, 8 ... at most 30 s, by the failures of the same process within
                the window: what dies at once, again and again, must not keep a machine busy
    refusal     no restarts are left; or the process failed as it did the time before, with the same
                error at the same round, so that it would fail so again

A death without an error of its own (a signal, the kernel when memory runs out) can come about twice
by chance, so it only counts against the budget.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

LONGEST_S = 30.0
# what differs between two runs of the same error: who reported it first, addresses of objects,
# processes, ports
CHANGING = re.compile(r"^rank \d+ failed:|0x[0-9a-fA-F]+|\bpid \d+|(?<=:)\d{4,5}\b")


@dataclass(frozen=True)
class Failure:
    """How something ended: `error` is its message or traceback, "" where it left none; `round` the
    round in which it failed, None where that is not known, or before the first."""

    error: str = ""
    round: int | None = None
    who: str = ""  # "rank 3"; "": the whole run

    def repeats(self, before: Failure) -> bool:
        """Whether it is the same error at the same place."""
        same = _lasting(self.error) == _lasting(before.error)
        return bool(self.error) and same and self.round == before.round


@dataclass
class RestartBudget:
    """Restarts of one run. `first_s` is the pause before the first restart of a process."""

    most: int
    window_s: float
    first_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    _restarts: deque[tuple[float, str]] = field(default_factory=deque)  # when, and of whom
    _last: dict[str, Failure] = field(default_factory=dict)

    def allow(self, failure: Failure) -> float | str:
        """Seconds to wait before a restart, which counts as spent; or why there is none."""
        before, self._last[failure.who] = self._last.get(failure.who), failure
        if before is not None and failure.repeats(before):
            return _repeated(failure)
        now = self.clock()
        while self._restarts and now - self._restarts[0][0] >= self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.most:
            return f"restarts={self.most} within {self.window_s:g} s is used up"
        times = sum(who == failure.who for _, who in self._restarts)
        self._restarts.append((now, failure.who))
        return self._pause_s(times)

    def _pause_s(self, times: int) -> float:
        if times == 0:
            return min(self.first_s, LONGEST_S)
        # 2.0**1024 is no float: a budget may be large
        return min(LONGEST_S, 2.0 ** min(times if self.first_s else times - 1, 10))


def _repeated(failure: Failure) -> str:
    who = f"{failure.who} " if failure.who else ""
    at = "before its first round" if not failure.round else f"at round {failure.round}"
    return f"{who}failed twice {at} with the same error: a restart would fail again"


def _lasting(error: str) -> str:
    return CHANGING.sub("", error).strip()
