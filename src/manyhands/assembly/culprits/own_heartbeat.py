"""This rank's own heartbeat: what its training thread is in, how long, and its stack."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING

from manyhands.data.batches import BatchIterator
from manyhands.exchange.activity import ROUNDS, SCRIPT
from manyhands.launch import process_state
from manyhands.observe.rank_heartbeat import RankHeartbeat, allowed

if TYPE_CHECKING:
    from manyhands.assembly.rank_context import RankContext

STACK_LINES = 8
PACE_S, PACE_ROUNDS = 10.0, 3  # over which a rank's own seconds a round are taken, at least
KEEP_S = 60.0
DOING = {ROUNDS: "compute", SCRIPT: "the script, between two epochs"}


class OwnHeartbeat:
    """Made in the training thread; called in the thread that watches it."""

    def __init__(self, context: RankContext, stack_after_s: float):
        self._context, self._stack_after_s = context, stack_after_s
        self._thread = threading.get_ident()
        self.batches: BatchIterator | None = None
        self.patient = context.plan.compile
        self._number, self._dump = 0, process_state.register_dump()
        self._marks: deque[tuple[float, int, float, float]] = deque()

    def __call__(self, ended: bool = False) -> RankHeartbeat:
        activity, here = self._context.group.activity, self._context.process
        now = time.perf_counter()
        call, entered, since = activity.call, activity.entered, activity.since
        stuck_s = max(0.0, now - since)
        usual, may = allowed(
            activity.phase, ROUNDS, list(activity.recent), dict(activity.longest), self.patient
        )
        rounds, own_s, waited_s = self._pace(now)
        self._number += 1
        return RankHeartbeat(
            here.rank,
            here.host,
            here.machine,
            os.getpid(),
            self._number,
            activity.round,
            self._doing(),
            call=f"{call} #{activity.calls}" if call else "",
            call_s=max(0.0, now - entered) if call else 0.0,
            calls=activity.calls,
            stuck_s=stuck_s,
            usual_s=usual,
            allowed_s=may,
            own_s=own_s,
            waited_s=waited_s,
            rounds=rounds,
            patient=self.patient,
            stack=self._stack() if stuck_s > may + self._stack_after_s else (),
            dump=self._dump,
            ended=ended,
            in_rounds=activity.phase == ROUNDS,
        )

    def _doing(self) -> str:
        activity, batches = self._context.group.activity, self.batches
        if activity.phase == ROUNDS and batches is not None and batches.loading:
            return "data loading"
        if activity.phase == ROUNDS and activity.round == self._context.group.round:
            return "its callbacks, between two rounds"
        return DOING.get(activity.phase, activity.phase)

    def _pace(self, now: float) -> tuple[int, float, float]:
        """(rounds, own seconds of one, seconds waited in one), over the last moments."""
        activity, marks = self._context.group.activity, self._marks
        last = now, activity.rounds, activity.rounds_s, activity.waited_s
        while (
            len(marks) > 1 and now - marks[1][0] > PACE_S and last[1] - marks[1][1] >= PACE_ROUNDS
        ):
            marks.popleft()
        while marks and now - marks[0][0] > KEEP_S and len(marks) > 1:
            marks.popleft()
        marks.append(last)
        first = marks[0]
        rounds = last[1] - first[1]
        if rounds <= 0:
            return 0, 0.0, 0.0
        waited = (last[3] - first[3]) / rounds
        return rounds, max(0.0, (last[2] - first[2]) / rounds - waited), waited

    def _stack(self) -> tuple[str, ...]:
        frame = sys._current_frames().get(self._thread)
        found = traceback.extract_stack(frame)[-STACK_LINES:] if frame is not None else []
        return tuple(f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in found)
