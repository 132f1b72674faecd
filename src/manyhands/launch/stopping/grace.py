"""Time to leave: what the launcher says when it asks ranks to stop, and when it kills them.

After `grace_s` a rank that has not saved is killed. That it has lost work must be said: who it was,
and with which checkpoint the run can go on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch.distributed as dist

from manyhands.errors import LaunchError
from manyhands.launch import environment
from manyhands.launch.signals import Stop

LATE = "late"  # kind of the error of ranks that had to be killed
STOPPED = "stopped"  # and of those that left in time, or before they had anything to save


def say_stopping(stop: Stop, grace_s: float) -> None:
    print(
        f"\n{stop.notice}: saving and stopping, within grace_s={grace_s:g}; "
        "Ctrl-C again stops at once",
        file=sys.stderr,
        flush=True,
    )


def stopped_error(stop: Stop, late: Sequence[int], grace_s: float, store: dist.Store) -> Exception:
    """`late`: the ranks that were killed when the time was over; `store`: the rendezvous."""
    code = 128 + stop.requested
    if not late:
        return LaunchError(f"stopped by {stop.notice}", code, STOPPED)
    one = len(late) == 1
    ranks = f"rank{'' if one else 's'} {', '.join(map(str, late))}"
    return LaunchError(
        f"stopped by {stop.notice}: {ranks} had not saved within grace_s={grace_s:g} and "
        f"{'was' if one else 'were'} killed",
        code,
        LATE,
        directory=_directory(store),
    )


def _directory(store: dist.Store) -> str:
    """The directory of the job's last run, where rank 0 has chosen it and told the others."""
    runs, found = 0, ""
    while store.check([key := f"{environment.PREFIX}/run/{runs}/directory"]):
        found = json.loads(bytes(store.get(key))).get("path", "")
        runs += 1
    return found
