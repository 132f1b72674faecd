"""Watcher: a thread of each rank that posts its heartbeat; that of the first rank names culprits.

    every second (or a fifth of stall_s)    post the own heartbeat into the rendezvous store
    the lowest rank that is awake           read those of all; report stalls and stragglers, once

So a stopped rank 0 is reported by rank 1. The thread has a connection of its own to the store: the
training thread may be waiting on the other one. It costs a store's two requests a second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from manyhands.assembly.culprits.own_heartbeat import OwnHeartbeat
from manyhands.core import Event
from manyhands.launch import process_state, replacements
from manyhands.observe import stalls
from manyhands.observe.events import say
from manyhands.observe.heartbeats import LONG_S, Heartbeat, Sighting
from manyhands.observe.stalls import Stall

if TYPE_CHECKING:
    from manyhands.assembly.rank_context import RankContext

BEAT_S = 1.0
STORE_S = 5.0  # for the store to answer
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Heartbeat).decode


class Watcher:
    """Made and closed by the training thread; `own` is told of its batches."""

    def __init__(self, context: RankContext):
        plan, here = context.plan, context.process
        self._context, self._rank, self._size = context, here.rank, here.size
        self._beat_s = min(BEAT_S, plan.stall_s / 5)
        # a heartbeat may be one beat old and the next look one beat away: named within stall_s
        self._limit_s, self._stale_s = plan.stall_s - 2 * self._beat_s, 3 * self._beat_s
        self.own = OwnHeartbeat(context, self._limit_s / 2)
        self._store: dist.Store | None = None
        self._seen: dict[int, tuple[Heartbeat, float]] = {}  # and when it was new to us
        self._stall: Stall | None = None
        self._stalled_s = 0.0
        self._started = self._beaten = self._woken = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join(STORE_S)
        with contextlib.suppress(Exception):
            self._post(self.own(ended=True))
        self.own.close()
        self._store = None

    def _run(self) -> None:
        while not self._end.wait(self._beat_s):
            try:
                self._beat()
            except Exception:  # watching never ends training
                self._store = None  # its connection may hold half an answer

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten > self._stale_s:
            self._woken = now  # we were stopped ourselves: what we remember of others is old
        self._beaten = now
        self._post(self.own())
        if now - self._woken < self._stale_s or not self._on_duty(now):
            return
        self._look(now)

    # -- the store --

    def _post(self, beat: Heartbeat) -> None:
        self._connected().set(f"heartbeat/{self._rank}", _encode(beat).decode())

    def _connected(self) -> dist.Store:
        if self._store is None:
            store: Any = self._context.store
            self._store = store.clone()
            self._store.set_timeout(timedelta(seconds=STORE_S))
        return self._store

    def _read(self, ranks: Sequence[int]) -> None:
        store, now = self._connected(), time.monotonic()
        there = [r for r in ranks if r in self._seen or store.check([f"heartbeat/{r}"])]
        if not there:
            return
        for r, raw in zip(there, store.multi_get([f"heartbeat/{r}" for r in there]), strict=True):
            beat, before = _decode(raw), self._seen.get(r)
            if before is None or (beat.pid, beat.number) != (before[0].pid, before[0].number):
                self._seen[r] = beat, now

    def _sightings(self, now: float) -> dict[int, Sighting]:
        found = {}
        for r, (beat, at) in self._seen.items():
            age_s = max(0.0, now - at)
            stale = age_s > self._stale_s and not beat.ended
            found[r] = Sighting(beat, age_s, self._state(beat) if stale else "")
        return found

    def _state(self, beat: Heartbeat) -> str:
        here = self._context.process
        same = beat.host == here.host and beat.machine == here.machine
        return process_state.state(beat.pid) if same else ""

    # -- what is seen --

    def _on_duty(self, now: float) -> bool:
        """Whether this rank looks for all: no lower one is awake, or it has said what is open."""
        if self._stall is not None:
            return True
        for r in range(self._rank):
            self._read([r])
            if r not in self._seen:
                if now - self._started < LONG_S:
                    return False  # it is still starting
                continue
            beat, at = self._seen[r]
            if not beat.ended and now - at <= self._stale_s:
                return False
        return True

    def _look(self, now: float) -> None:
        self._read(range(self._size))
        seen = self._sightings(now)
        stall = stalls.diagnose(seen, self._limit_s, self._stale_s)
        before, self._stall = self._stall, stall
        if stall is None and before is not None:
            self._say("stall over", stalls.over(before, seen, now - self._stalled_s))
        if stall is None:
            return
        if before is None:
            self._stalled_s = now - stall.stuck_s
        new = sorted(set(stall.culprits) - set(before.culprits if before else ()))
        if before is None or new:
            stacks = [self._stack_of(seen[r]) for r in stall.culprits]
            self._say("stalled", "\n".join([stall.text, *filter(None, stacks)]), stall.stuck_s)
            if self._context.plan.hang == "exclude" and stall.held_up:
                self._exclude(new)

    def _stack_of(self, s: Sighting) -> str:
        """Of a rank that cannot say it itself; "": it has, or cannot be asked."""
        if s.state not in ("R", "S", "D") or s.beat.stack:
            return ""
        lines = process_state.dumped_stack(s.beat.pid, s.beat.rank, s.beat.dump)
        return "\n".join([f"rank {s.beat.rank} is at", *(f"  {x}" for x in lines)] * bool(lines))

    def _exclude(self, ranks: Sequence[int]) -> None:
        """Ask the launcher to go on without these processes."""
        for r in ranks:
            pid = self._seen[r][0].pid
            replacements.tell(self._connected(), f"hung/{r}", pid)

    def _say(self, name: str, text: str, seconds: float = 0.0) -> None:
        context = self._context
        event = Event(time.time(), self._rank, context.group.round, name, seconds, value=text)
        context.recorder.emit(event)
        context.recorder.flush()
        if not context.leads:  # only the first rank shows its events
            say(text)
