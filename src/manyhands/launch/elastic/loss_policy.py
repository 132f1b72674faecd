"""Loss policy: whether another process is started in place of a lost one, or the run ends.

killed, or it hung          another one is started, within the budget (restarts=); at once where
                            it had been at work, after a pause where it never came so far
an error of the user's      the same: memory or a disk may have been full. The same error at the
                            same round again ends the run, since it would come back each time
an error of ours            ends the run: a plan, a task or a model that is wrong stays wrong
before the first epoch      an error ends the run, as it would without elastic=
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import LaunchError, PeerLost
from manyhands.launch.restart_budget import Failure, RestartBudget

VICTIMS = (PeerLost.__name__,)  # kinds of errors of ranks that lost others


@dataclass
class LossPolicy:
    budget: RestartBudget
    due: dict[int | None, float] = field(default_factory=dict)  # seat -> when; None: a spare
    given_up: dict[int | None, str] = field(default_factory=dict)  # seat -> why
    _losses: int = 0

    def lost(
        self, seat: int | None, said: dict[str, Any] | None, begun: bool, at_work: bool
    ) -> LaunchError | str:
        """A process was lost: the error that ends the run; or why nobody takes its place, "" where
        somebody will. `said`: its own error; `begun`: there was an epoch before; `at_work`: it took
        part in the present one."""
        own = said is not None and said["kind"] not in VICTIMS
        if said is not None and own and (said["ours"] or not begun):
            return _error(said, "")
        who = "a spare" if seat is None else f"rank {seat}"
        self._losses += 1
        # who was killed at work is no process that cannot start: it is not made to wait
        failure = Failure(who=f"{who}, loss {self._losses}" if at_work else who)
        if said is not None and own:
            failure = Failure(said["text"], said.get("round"), who)
        answer = self.budget.allow(failure)
        if isinstance(answer, str):
            if said is not None and own:
                return _error(said, answer)
            self.given_up[seat] = answer
            return answer
        self.due[seat] = time.monotonic() + answer
        return ""

    def may_start(self, seat: int | None) -> bool:
        """Whether the pause before the next process of this seat is over."""
        if seat in self.given_up or self.due.get(seat, 0.0) > time.monotonic():
            return False
        self.due.pop(seat, None)
        return True


def _error(said: dict[str, Any], why: str) -> LaunchError:
    text = f"{said['text'].rstrip()}\n{why}".rstrip()
    return LaunchError(text, 2 if said["ours"] else 1, said["kind"])
