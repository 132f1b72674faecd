"""Watcher: a thread of each rank that posts its heartbeat; that of the first rank names culprits.

    every second (or a fifth of stall_s)    post the own heartbeat into the rendezvous store
    the lowest rank that is awake           read those of all; report stalls and stragglers, once

So a stopped rank 0 is reported by rank 1, also where rank 0 hosts the store. The thread has a
connection of its own to the store: the training thread may be waiting on the other one. It costs
two requests to the store a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from manyhands.assembly.culprits.own_heartbeat import OwnHeartbeat
from manyhands.core import Event, Layout, Store
from manyhands.launch import environment, process_state
from manyhands.launch.elastic.worker_replacements import tell
from manyhands.observe import stalls
from manyhands.observe.events import say
from manyhands.observe.rank_heartbeat import LONG_S, RankHeartbeat, Sighting
from manyhands.observe.stalls import Stall
from manyhands.observe.stragglers import Stragglers, caused

if TYPE_CHECKING:
    from manyhands.assembly.rank_context import RankContext

BEAT_S = 1.0
STORE_S = 5.0  # for the store to answer
CLOSE_S = 1.0  # for a thread that waits for it, at the end
SHARES_S = 10.0  # between two events that say whose fault the waiting is
REMEDIES = {
    "report": "straggler=rebalance gives it smaller batches",
    "rebalance": "its batches are made smaller",
    "exclude": "the run goes on without it",
    "else": "look at what else runs on its host",
}
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RankHeartbeat).decode


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
        self._seen: dict[int, tuple[RankHeartbeat, float]] = {}  # and when it was new to us
        self._stall: Stall | None = None
        self._stalled_s = 0.0
        in_step = plan.strategy.link is not Store and not plan.strategy.shares_parameters
        # stages of a pipeline and slices of a tensor need not be alike
        self._alike = [(ranks, Stragglers(in_step)) for ranks in _same_work(plan.layout)]
        fits = plan.straggler != "report" or (plan.merge == "all_reduce" and not plan.elastic)
        self._remedy = REMEDIES[plan.straggler if fits else "else"]
        self._shared = time.monotonic()
        self._started = self._beaten = self._woken = self._answered = time.monotonic()
        self._judging = threading.Lock()
        self._end = threading.Event()
        runs = [self._run]
        if self._rank == 1 and environment.rank_0_hosts_store():
            runs.append(self._run_beside)
        self._threads = [threading.Thread(target=r, name="heartbeat", daemon=True) for r in runs]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(CLOSE_S)
        # without a new connection: who hosted the store may be gone
        if (store := self._store) is not None and not self._threads[0].is_alive():
            with contextlib.suppress(Exception):
                store.set(self._key(self._rank), _encode(self.own(ended=True)).decode())
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
        self._post(self._own())
        self._answered = time.monotonic()
        if now - self._woken < self._stale_s or not self._on_duty(now):
            return
        self._look(now)

    # -- the store --

    def _post(self, beat: RankHeartbeat) -> None:
        self._connected().set(self._key(self._rank), _encode(beat).decode())

    def _key(self, rank: int) -> str:
        return f"heartbeat/{rank}"

    def _connected(self) -> dist.Store:
        if self._store is None:
            store: Any = self._context.store
            self._store = store.clone()
            self._store.set_timeout(timedelta(seconds=STORE_S))
        return self._store

    def _read(self, ranks: Sequence[int]) -> None:
        store, now = self._connected(), time.monotonic()
        there = [r for r in ranks if r in self._seen or store.check([self._key(r)])]
        if not there:
            return
        for r, raw in zip(there, store.multi_get([self._key(r) for r in there]), strict=True):
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

    def _state(self, beat: RankHeartbeat) -> str:
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
        interruption = self._context.interruption
        if interruption is not None and interruption.why:
            return  # this group of ranks is over, and the next one is watched by another
        self._read(range(self._size))
        self._judge(now, self._sightings(now))

    def _run_beside(self) -> None:
        """Where rank 0 hosts the store and is stopped, the other thread waits for an answer."""
        while not self._end.wait(self._beat_s):
            now = time.monotonic()
            if now - self._answered > self._stale_s and 0 in self._seen:
                with contextlib.suppress(Exception):
                    self._judge(now, {0: self._sightings(now)[0], 1: Sighting(self._own())})

    def _own(self) -> RankHeartbeat:
        with self._judging:
            return self.own()

    def _judge(self, now: float, seen: dict[int, Sighting]) -> None:
        with self._judging:
            self._report(now, seen)

    def _report(self, now: float, seen: dict[int, Sighting]) -> None:
        stall = stalls.diagnose(seen, self._limit_s, self._stale_s)
        if stall is None:
            if self._stall is not None:
                self._say("stall over", stalls.over(self._stall, seen, now - self._stalled_s))
            self._stall = None
            return self._compare(now, seen)
        known = () if self._stall is None else self._stall.culprits
        new = [r for r in stall.culprits if r not in known]
        if self._stall is None or new:
            self._stalled_s = now - stall.stuck_s
            stacks = [self._stack_of(seen[r]) for r in stall.culprits]
            self._say("stalled", "\n".join([stall.text, *filter(None, stacks)]), stall.stuck_s)
            if self._context.plan.hang == "exclude" and stall.held_up:
                self._exclude(new)
        # one that has just woken is no culprit any more, but the stall is not over yet
        self._stall = dataclasses.replace(stall, culprits=(*known, *new))

    def _compare(self, now: float, seen: dict[int, Sighting]) -> None:
        """Report stragglers, and now and then whose fault the waiting is."""
        for ranks, stragglers in self._alike:
            beats = [seen[r].beat for r in ranks if r in seen and seen[r].age_s <= self._stale_s]
            for found in stragglers.look(now, [b for b in beats if not b.ended]):
                self._say("straggler", f"{found.text}; {self._remedy}", found.seconds)
                if self._context.plan.straggler == "exclude":
                    self._exclude([found.beat.rank])
            if now - self._shared >= SHARES_S and stragglers.in_step:
                shares = caused({b.rank: b.own_s for b in beats if b.rounds})
                self._emit("waiting", {str(r): s for r, s in shares.items() if s >= 0.01})
        if now - self._shared >= SHARES_S:
            self._shared = now

    def _stack_of(self, s: Sighting) -> str:
        """Of a rank that cannot say it itself; "": it has, or cannot be asked."""
        if s.state not in ("R", "S", "D") or s.beat.stack:
            return ""
        lines = process_state.dumped_stack(s.beat.pid, s.beat.dump)
        return "\n".join([f"rank {s.beat.rank} is at", *(f"  {x}" for x in lines)] * bool(lines))

    def _exclude(self, ranks: Sequence[int]) -> None:
        """Ask the launcher to go on without these processes."""
        for r in ranks:
            pid = self._seen[r][0].pid
            tell(self._connected(), f"hung/{r}", pid)

    def _say(self, name: str, text: str, seconds: float = 0.0) -> None:
        self._emit(name, text, seconds)
        self._context.recorder.flush()
        if not self._context.leads:  # only the first rank shows its events
            say(text)

    def _emit(self, name: str, value: str | dict[str, float], seconds: float = 0.0) -> None:
        round = self._context.group.round
        if value:
            event = Event(time.time(), self._rank, round, name, seconds, value=value)
            self._context.recorder.emit(event)


def _same_work(layout: Layout) -> list[list[int]]:
    """Ranks that compute the same on different batches, group by group."""
    found: dict[tuple[int, int], list[int]] = {}
    for r in range(layout.size):
        where = layout.coordinates(r)
        found.setdefault((where["pipe"], where["tensor"]), []).append(r)
    return [ranks for ranks in found.values() if len(ranks) > 1]
