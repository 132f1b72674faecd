"""State of a clock as plain values: what a coordinator that is started again goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from manyhands.core import Tick
from manyhands.server.clock import Clock, WaitingTick, WorkerState
from manyhands.server.elastic.kept_state import elastic_state, load_elastic

KEPT = 64  # commits, the newest


def clock_state(clock: Clock) -> dict[str, Any]:
    with clock.changed:
        return {
            "size": clock.size,
            "version": clock.version,
            "workers": [asdict(w) for w in clock.workers],
            "commits": list(clock.commits)[-KEPT:],
            "steps": clock.steps.state(),
            "created": sorted(clock.created),
            "elastic": elastic_state(clock.elastic),
        }


def clock_of(state: Mapping[str, Any]) -> Clock:
    clock = Clock(state["size"])
    clock.version = state["version"]
    clock.workers = [_worker(w) for w in state["workers"]]
    clock.commits.extend((v, [(w, c) for w, c in members]) for v, members in state["commits"])
    clock.steps.load(state["steps"])
    clock.created = set(state["created"])
    load_elastic(clock.elastic, state["elastic"])
    return clock


def _worker(state: Mapping[str, Any]) -> WorkerState:
    waiting, answer = state["waiting"], state["answer"]
    found = WorkerState(**state)
    found.waiting = None if waiting is None else WaitingTick(**waiting)
    found.answer = None if answer is None else Tick(**answer)
    return found
