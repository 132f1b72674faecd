"""Roster of an elastic run: which processes sit in which seats, and which epoch follows from that.

It decides, and starts nothing itself:

    started, ready, lost, finished     what happened to a process
    missing()                          how many processes should be started, and for which seats
    decide()                           the next epoch, where there is one to publish

A process takes a seat when it is ready, that is, when its task is loaded. One that is lost empties
its seat at once; a spare, or a member of another replica that is not complete, takes it. Ranks of
replicas that stay incomplete wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manyhands.membership.rank_epochs import RankEpoch, complete_replicas, filled


@dataclass
class Roster:
    least: int  # replicas
    most: int
    want: int  # replicas, as asked for now
    inner: int = 1  # ranks of a replica
    spares: int = 0
    seated: dict[int, int] = field(default_factory=dict)  # seat -> member
    starting: dict[int, int | None] = field(default_factory=dict)  # member -> seat; None: a spare
    free: list[int] = field(default_factory=list)  # ready, without a seat
    left: set[int] = field(default_factory=set)  # told to leave
    epoch: RankEpoch | None = None
    why: str = ""  # of the last loss
    given_up: set[int] = field(default_factory=set)  # seats that stay empty: nothing is left to try
    _number: int = 0  # of members so far

    # -- what happened --

    def add(self, seat: int | None) -> int:
        """A process is started for a seat, or as a spare: its number."""
        member = self._number
        self._number += 1
        self.starting[member] = seat
        return member

    def ready(self, member: int) -> None:
        seat = self.starting.pop(member, None)
        if seat is None or seat in self.seated or seat >= self.want * self.inner:
            self.free.append(member)
        else:
            self.seated[seat] = member
            self.given_up.discard(seat)

    def lost(self, member: int, why: str) -> int | None:
        """The seat that is empty now; None: it had none."""
        seat = self.seat_of(member)
        if seat is not None:
            del self.seated[seat]
        wanted = self.starting.pop(member, seat)
        if member in self.free:
            self.free.remove(member)
        if self.epoch is not None and member in self.epoch.members:
            self.why = why
        return wanted

    def scale(self, want: int) -> None:
        """So many replicas from here on; members beyond them leave at the next boundary."""
        self.want = want
        self.given_up.clear()
        for seat in [s for s in self.seated if s >= want * self.inner]:
            self.left.add(self.seated.pop(seat))
        for member in [m for m, s in self.starting.items() if s is not None]:
            if (self.starting[member] or 0) >= want * self.inner:
                self.starting[member] = None

    # -- what follows --

    def seat_of(self, member: int) -> int | None:
        return next((s for s, m in self.seated.items() if m == member), None)

    def members(self) -> list[int]:
        """All processes that live, whatever they do."""
        return [*self.seated.values(), *self.free, *self.starting]

    def missing(self) -> list[int | None]:
        """Seats for which a process should be started; None: for a spare."""
        coming = {s for s in self.starting.values() if s is not None}
        seats = [
            s
            for s in range(self.want * self.inner)
            if s not in self.seated and s not in coming and s not in self.given_up
        ]
        spare = len(self.free) + sum(s is None for s in self.starting.values())
        takers = min(spare, len(seats))  # these take seats as soon as they are ready
        return [*seats[takers:], *[None] * (self.spares - (spare - takers))]

    def decide(self, loss: bool, over: bool = False) -> RankEpoch | None:
        """The next epoch; None: the present one stays, or too few are there.

        `loss`: a member of the present epoch is lost. `over`: do not wait for the least."""
        before = self.seated
        self.seated = filled(before, self.free, self.inner, self.want)
        taken = set(self.seated.values())
        self.free = [m for m in [*self.free, *before.values()] if m not in taken]
        replicas = complete_replicas(self.seated, self.inner)
        ranks = tuple(m for replica in replicas for m in replica)
        enough = len(replicas) >= self.least and (self.epoch is not None or not self.missing_now())
        if not replicas or not (enough or over):
            return None
        if not loss and not over and self.epoch is not None and self.epoch.members == ranks:
            return None
        number = 1 if self.epoch is None else self.epoch.number + 1
        planned = not loss and not over
        left = tuple(sorted(self.left))
        self.epoch = RankEpoch(number, ranks, len(replicas), planned, self.why, left, over)
        return self.epoch

    def missing_now(self) -> bool:
        """Whether a seat is still to be taken by a process that is on its way."""
        return any(s is not None for s in self.starting.values()) or bool(
            [s for s in self.missing() if s is not None]
        )

    def replicas(self) -> int:
        return len(complete_replicas(self.seated, self.inner))
