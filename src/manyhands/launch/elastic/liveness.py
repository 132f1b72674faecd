"""Liveness of ranks: those that hang, or that no longer reach the rendezvous store.

A process that ends is seen by its handle. One that lives and sends no heartbeat for `lease_s` is
cut off from the others, unless somebody has stopped it: that is for hang= to decide. Ranks that
hang are named by the ranks that wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from manyhands.launch import process_state, run_token
from manyhands.membership.rank_epochs import RankEpoch

STOPPED = ("T", "t")


class Liveness:
    def __init__(self, keys: dist.Store, lease_s: float, token: str):
        self._keys, self._lease_s, self._token = keys, lease_s, token
        self._beats: dict[int, tuple[bytes, float]] = {}  # member -> last heartbeat, and when

    def lost(self, epoch: RankEpoch | None, pids: Mapping[int, int]) -> Iterator[tuple[int, str]]:
        """Members to leave out, and why. `pids`: of those that live."""
        if epoch is None:
            return
        now = time.monotonic()
        for rank, member in enumerate(epoch.members):
            if member not in pids:
                continue
            if self._named(epoch, rank) == pids[member]:
                yield member, "hangs"
            elif (
                self._silent_s(member, now) > self._lease_s
                and process_state.state(pids[member]) not in STOPPED
            ):
                yield member, f"sent no heartbeat for {self._lease_s:g} s"

    def _named(self, epoch: RankEpoch, rank: int) -> int | None:
        """The process that the others wait for as this rank, where they have given it up."""
        key = f"hung/{rank}"
        if not self._keys.check([f"epoch/{epoch.number}/{key}"]):
            return None
        raw = bytes(self._keys.get(f"epoch/{epoch.number}/{key}"))
        pid = run_token.verify(self._token, key, raw)  # signed inside the epoch's own keys
        return int(pid) if pid else None

    def broken(self, epoch: RankEpoch | None) -> bool:
        """Whether a rank has lost the others, though no process has ended: a connection broke."""
        if epoch is None:
            return False
        return any(self._keys.check([f"epoch/{epoch.number}/broken/{m}"]) for m in epoch.members)

    def _silent_s(self, member: int, now: float) -> float:
        key = f"beat/{member}"
        beat = bytes(self._keys.get(key)) if self._keys.check([key]) else b""
        if member not in self._beats or self._beats[member][0] != beat:
            self._beats[member] = beat, now
        return now - self._beats[member][1]
