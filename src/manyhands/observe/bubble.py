"""Pipeline bubble: the share of time in which the ranks of a pipeline did not compute.

    bubble = 1 - sum of all ranks' work / (ranks x length of the step)
    by formula, for gpipe and 1f1b: (p-1)/(m+p-1)

A step lasts from the start of the first work on any rank to the end of the last work on any rank.
Work is forward, backward and weight; sending, receiving and waiting belong to the bubble.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from manyhands.core import Event
from manyhands.observe.pipeline_trace import WORK, is_stage_event


def bubble(events: Iterable[Event]) -> float | None:
    """The bubble over all rounds of `events` of one pipeline; None: there is no work in them."""
    idle, whole = 0.0, 0.0
    for work in _steps(events).values():
        ranks = {e.rank for e in work}
        lasted = max(e.time_s + e.seconds for e in work) - min(e.time_s for e in work)
        idle += lasted * len(ranks) - sum(e.seconds for e in work)
        whole += lasted * len(ranks)
    return idle / whole if whole else None


def waits(events: Iterable[Event]) -> dict[int, float]:
    """By rank: the share of the steps in which it did not compute."""
    lasted, worked = 0.0, defaultdict[int, float](float)
    for work in _steps(events).values():
        lasted += max(e.time_s + e.seconds for e in work) - min(e.time_s for e in work)
        for e in work:
            worked[e.rank] += e.seconds
    return (
        {rank: 1 - seconds / lasted for rank, seconds in sorted(worked.items())} if lasted else {}
    )


def _steps(events: Iterable[Event]) -> dict[int, list[Event]]:
    steps: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.name in WORK and is_stage_event(event):
            steps[event.round].append(event)
    return steps
