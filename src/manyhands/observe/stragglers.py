"""Stragglers: ranks that are slow for long, and how much of the others' waiting each rank causes.

    own_i      seconds a round of rank i, without those that it waited in exchanges
    slow       own_i > 1.5 median(own), for a minute
    waiting    sum_j (max(own) - own_j): what ranks wait in a round, where all keep step

The waiting between two neighbouring values of `own` would vanish if the ranks above it were as fast
as those below. So it is caused by the ranks above, in equal parts (the Shapley value of the airport
game). A rank that waits in an exchange causes nothing: its own time is short.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from manyhands.observe.rank_heartbeat import RankHeartbeat
from manyhands.observe.text import took

SLOW = 1.5
AFTER_S = 60.0
LEAST = 0.01  # of a round, over all ranks: less waiting is nobody's fault


def caused(own: Mapping[int, float]) -> dict[int, float]:
    """Each rank's share of the waiting that it causes; empty where there is next to none."""
    ordered = sorted(own, key=lambda r: own[r])
    shares, n = dict.fromkeys(ordered, 0.0), len(ordered)
    total = sum(own[ordered[-1]] - own[r] for r in ordered) if ordered else 0.0
    if not ordered or total <= LEAST * n * own[ordered[-1]]:
        return {}
    for k in range(1, n):
        gap = own[ordered[k]] - own[ordered[k - 1]]
        for r in ordered[k:]:
            shares[r] += gap * k / (n - k) / total
    return shares


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow, compared with ranks of the same work."""

    beat: RankHeartbeat
    median_s: float
    seconds: float
    share: float | None  # of the others' waiting; None: ranks do not keep step

    @property
    def text(self) -> str:
        beat = self.beat
        waiting = "" if self.share is None else f", and caused {self.share:.0%} of all waiting"
        return (
            f"{beat.name} needs {took(beat.own_s)} a round without waiting, "
            f"{beat.own_s / self.median_s:.1f} times the median ({took(self.median_s)}), "
            f"for {took(self.seconds)}{waiting}"
        )


@dataclass
class Stragglers:
    """Remembers since when a rank is slow. `in_step`: ranks wait for each other in every round."""

    in_step: bool = True
    after_s: float = AFTER_S
    _since: dict[int, float] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)

    def look(self, now: float, beats: Iterable[RankHeartbeat]) -> list[Straggler]:
        """Those that have become stragglers, among ranks that do the same work."""
        known = {b.rank: b for b in beats if b.rounds and b.own_s > 0}
        own = {r: b.own_s for r, b in known.items()}
        # of an even number the faster one: of two ranks the other may be slow
        median = statistics.median_low(own.values()) if len(own) > 1 else 0.0
        slow = [r for r, s in own.items() if median and s > SLOW * median]
        for r in set(known) - set(slow):
            self._since.pop(r, None)
            self._told.discard(r)
        found = []
        for r in slow:
            since = self._since.setdefault(r, now)
            if now - since >= self.after_s and r not in self._told:
                self._told.add(r)
                share = caused(own).get(r, 0.0) if self.in_step else None
                found.append(Straggler(known[r], median, now - since, share))
        return found
