"""Epoch follower: how a rank learns of membership epochs, and tells that it lives.

A thread with a connection of its own to the rendezvous store looks for the next epoch. Where a rank
is lost, it interrupts what this rank waits for; a planned epoch waits for the next boundary.

    ready/<member>         this process has loaded its task: it may be given a seat
    epoch/<n>              the epochs, signed by the launcher
    epoch/<n>/here/<m>     member m has left the epochs before, and holds these boundaries
    beat/<member>          changes every second while the process lives and reaches the store
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from manyhands.core import ProcessInfo
from manyhands.errors import LaunchError
from manyhands.launch import environment, run_token
from manyhands.launch.elastic.worker_replacements import tell
from manyhands.membership.rank_epochs import RankEpoch, decode

LOOK_S, BEAT_S = 0.05, 1.0
HERE_S = 0.003  # between two looks for the others


class EpochFollower:
    def __init__(self, member: int, here: ProcessInfo, store: dist.Store):
        self.member, self._store = member, store
        self._token = run_token.of_environment()
        self._latest: RankEpoch | None = None
        self._loss: RankEpoch | None = None  # the latest that was not planned
        self._news = threading.Condition()
        self._interrupt: Callable[[str], None] | None = None
        self._planned = False  # whether planned epochs interrupt too
        self._closed = threading.Event()
        self._gone = ""  # why the launcher cannot be reached any more
        # the thread's own: a client of the store serves one call at a time
        self._own = environment.own_store(here)
        self._thread = threading.Thread(target=self._follow, name="epochs", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> RankEpoch | None:
        return self._latest

    def ready(self, note: Mapping[str, Any]) -> None:
        tell(self._store, f"ready/{self.member}", json.dumps(note))

    def next(self, after: int) -> RankEpoch | None:
        """The newest epoch after number `after` that this process takes part in; None: it is not
        needed any more."""
        with self._news:
            while True:
                found = self._latest
                if found is not None and self.member in found.left:
                    return None
                if found is not None and found.number > after and self.member in found.members:
                    return found
                self._refuse_gone()
                self._news.wait()

    def newer(self, epoch: RankEpoch) -> bool:
        """Whether there is a later epoch. Raises LaunchError where the launcher is gone."""
        self._refuse_gone()
        return self._latest is not None and self._latest.number > epoch.number

    def interrupt_by(
        self,
        interrupt: Callable[[str], None] | None,
        epoch: RankEpoch,
        planned: bool = False,
    ) -> None:
        """What to call, from the thread, where a member of `epoch` is lost. `planned`: also where a
        planned epoch follows it."""
        with self._news:
            self._interrupt, self._planned = interrupt, planned
            latest = self._latest if planned else self._loss
        if interrupt is not None and latest is not None and latest.number > epoch.number:
            self._interrupt_for(latest)

    def all_here(self, epoch: RankEpoch, held: Any) -> dict[int, Any] | None:
        """Wait for all members of `epoch`: what each says it holds. None: there is a newer
        epoch."""
        keys = {m: f"epoch/{epoch.number}/here/{m}" for m in epoch.members}
        tell(self._store, keys[self.member], json.dumps(held))
        while not self._store.check(list(keys.values())):
            if self.newer(epoch):
                return None
            self._refuse_gone()
            time.sleep(HERE_S)
        return {m: json.loads(self.read(self._store, key)) for m, key in keys.items()}

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2.0)

    # -- the thread --

    def _follow(self) -> None:
        number, beaten, beats = 1, 0.0, 0
        keys = self._own
        try:
            while not self._closed.wait(LOOK_S):
                if time.monotonic() - beaten > BEAT_S:
                    beaten, beats = time.monotonic(), beats + 1
                    keys.set(f"beat/{self.member}", str(beats))
                while keys.check([f"epoch/{number}"]):
                    self._take(decode(self.read(keys, f"epoch/{number}")))
                    number += 1
        except (RuntimeError, LaunchError) as e:
            if self._closed.is_set():
                return
            # the launcher is gone, or this process was cut off from it: its run goes on without it
            with self._news:
                self._gone = f"the run's launcher does not answer any more ({e})"
                self._news.notify_all()
            if self._interrupt is not None:
                self._interrupt(self._gone)

    def _refuse_gone(self) -> None:
        if self._gone:
            raise LaunchError(self._gone)

    def _take(self, epoch: RankEpoch) -> None:
        with self._news:
            self._latest = epoch
            self._loss = self._loss if epoch.planned else epoch
            self._news.notify_all()
        self._interrupt_for(epoch)

    def _interrupt_for(self, epoch: RankEpoch) -> None:
        act = self._interrupt
        if act is not None and (self._planned or not epoch.planned):
            act(f"{epoch.why or 'a rank is lost'} (epoch {epoch.number})")

    def read(self, store: dist.Store, key: str) -> str:
        """A value of the store that a process of this run has signed."""
        value = run_token.verify(self._token, key, bytes(store.get(key)))
        if value is None:
            raise LaunchError(
                f"{key} in the rendezvous was not written by this run: somebody else writes there; "
                "start again on another port"
            )
        return value
