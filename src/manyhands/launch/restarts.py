"""Restarts of a whole run: after a failure that may pass, from the last checkpoint.

may pass     a rank was killed or ended without a report, peers or servers were lost, or the user's
             code failed: a device, a disk, a network may do better the next time
may not      our own errors about the plan, the task or a checkpoint, a loss that became NaN, and
             what happens after somebody has asked to stop
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manyhands.errors import LaunchError, ManyhandsError, PeerLost, ServerLost
from manyhands.launch.restart_budget import Failure, RestartBudget
from manyhands.launch.signals import Stop
from manyhands.launch.stopping.grace import LATE, STOPPED

LOSSES = (PeerLost.__name__, ServerLost.__name__)
# ends without an error of its own, which could be compared with the one before
SILENT = ("killed", "ended", *LOSSES)
POLL_S = 0.1


@dataclass
class Restarts:
    """`newest` is the run's last checkpoint, "" where there is none yet."""

    budget: RestartBudget
    newest: Callable[[], str]
    any_failure: bool  # restarts=; else only lost servers are made up for (on_loss=restore)
    restores: bool  # on_loss=restore

    def run(self, attempt: Callable[[bool], dict[str, Any]]) -> dict[str, Any]:
        """`attempt(resume)` runs once; returns what the last one returned."""
        resume = False
        with Stop() as stop:
            while True:
                try:
                    return attempt(resume)
                except (LaunchError, ServerLost) as e:
                    if stop.requested or not self._may_pass(e):
                        raise
                    self._pause(e, stop)
                    resume = True

    def _may_pass(self, error: Exception) -> bool:
        kind = _kind(error)
        if kind == ServerLost.__name__ and self.restores and self.newest():
            return True
        if not self.any_failure or kind in ("", STOPPED, LATE):
            return False
        return kind in LOSSES or kind not in OURS

    def _pause(self, error: Exception, stop: Stop) -> None:
        """Say what comes, and wait; raises where there is no restart."""
        kind, text = _kind(error), str(error)
        failure = Failure("" if kind in SILENT else text, getattr(error, "round", None))
        delay_s = self.budget.allow(failure)
        if isinstance(delay_s, str):
            code = getattr(error, "exit_code", 1)
            raise LaunchError(f"{text}\n{delay_s}", code, kind) from error
        newest = self.newest()
        word = "restarts" if self.any_failure else "on_loss=restore"
        start = f"from {newest}" if newest else "from the beginning: there is no checkpoint yet"
        _say(f"{text}\nmanyhands: {word}: going on in {delay_s:g} s {start}")
        deadline = time.monotonic() + delay_s
        while (left := deadline - time.monotonic()) > 0:
            if stop.requested:
                raise LaunchError(
                    f"stopped by {stop.notice} before the run was started again; "
                    "go on with --resume",
                    128 + stop.requested,
                    STOPPED,
                )
            time.sleep(min(left, POLL_S))


def _kind(error: Exception) -> str:
    return error.kind if isinstance(error, LaunchError) else type(error).__name__


def _names(of: type[Exception]) -> set[str]:
    return {of.__name__}.union(*(_names(c) for c in of.__subclasses__()))


OURS = _names(ManyhandsError)


def _say(text: str) -> None:
    print(f"manyhands: {text}", file=sys.stderr, flush=True)
