"""Membership epochs of ranks: which processes train together, and in which order of ranks.

A member is a process; its number is never given again. It sits in a seat; seats in order are ranks,
and `inner` neighbouring seats are one replica. An epoch names the members of all complete replicas.
Whoever starts the processes decides on epochs, one after the other, and numbers them; ranks move
from one to a later one at the boundary of a round.

    planned    all ranks of the epoch before are there: they move when they reach a boundary
    else       one is lost: they stop at once, and go back to the last boundary that all have kept
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class RankEpoch:
    """One membership epoch. `members` are in the order of ranks."""

    number: int
    members: tuple[int, ...]
    data: int  # replicas
    planned: bool = False
    why: str = ""  # what happened, for people
    left: tuple[int, ...] = ()  # members that are not needed any more
    last: bool = False  # too few are left: save, and end

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def decode(text: str) -> RankEpoch:
    return msgspec.json.decode(text, type=RankEpoch)


def complete_replicas(seated: Mapping[int, int], inner: int) -> list[tuple[int, ...]]:
    """Members of each replica all of whose seats are taken, in the order of seats. `seated`: seat
    -> member."""
    replicas = sorted({seat // inner for seat in seated})
    seats = [range(r * inner, (r + 1) * inner) for r in replicas]
    return [tuple(seated[s] for s in own) for own in seats if all(s in seated for s in own)]


def filled(seated: Mapping[int, int], free: list[int], inner: int, most: int) -> dict[int, int]:
    """Seats with `free` members in empty ones: first where a replica lacks the fewest. Members of
    replicas that stay incomplete fill others, so that as many replicas as possible are complete.

    `most`: replicas. Seats from there on stay empty."""
    found = {seat: member for seat, member in seated.items() if seat < most * inner}
    pool = [*free]
    order = sorted(range(most), key=lambda r: (-_taken(found, r, inner), r))
    for at, replica in enumerate(order):
        empty = [s for s in _seats(replica, inner) if s not in found]
        later = [r for r in order[at + 1 :] if _taken(found, r, inner) < inner]
        others = [s for r in reversed(later) for s in _seats(r, inner) if s in found]
        if len(empty) > len(pool) + len(others):
            continue
        for seat in empty:
            found[seat] = pool.pop(0) if pool else found.pop(others.pop(0))
    return found


def _seats(replica: int, inner: int) -> range:
    return range(replica * inner, (replica + 1) * inner)


def _taken(seated: Mapping[int, int], replica: int, inner: int) -> int:
    return sum(seat in seated for seat in _seats(replica, inner))
