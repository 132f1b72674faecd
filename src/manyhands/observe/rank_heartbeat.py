"""Rank heartbeat: what each rank says about itself once a second, and how old that is.

stuck      seconds since its last round or phase ended
allowed    seconds that this may take: the usual round; or of another phase twice the longest
           seen, `LONG_S` where none was seen
own        seconds a round that it did not wait for others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LONG_S = 120.0  # start-up, compilation, the first evaluation: whoever waits there is not stuck
SHORT_S = 30.0  # of a phase that was short before: a disk or a file system may be slow today
KNOWN_ROUNDS = 3  # fewer say nothing about what is usual


@dataclass(frozen=True)
class RankHeartbeat:
    """RankHeartbeat of one rank, as it goes through the rendezvous store."""

    rank: int
    host: str
    machine: str
    pid: int
    number: int  # counts up
    round: int
    doing: str  # compute, data loading, evaluation, ...
    call: str  # the exchange that it waits in, such as "all_reduce #1559"; "": none
    call_s: float  # seconds in it
    calls: int
    stuck_s: float
    usual_s: float
    allowed_s: float
    own_s: float = 0.0
    waited_s: float = 0.0  # a round
    rounds: int = 0  # behind these two
    # long rounds among short ones are to be expected: compilation, a user's own loop
    patient: bool = False
    stack: tuple[str, ...] = ()  # of the training thread, innermost last; where it seems stuck
    dump: int = -1  # the file into which it writes its stack on a signal; -1: none
    ended: bool = False  # it needs no watching any more
    in_rounds: bool = True  # not in a phase of another kind

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Sighting:
    """A heartbeat, and how long ago it was new to the rank that looks."""

    beat: RankHeartbeat
    age_s: float = 0.0
    # of /proc/PID/stat, where it is a process of this machine; "": another, "gone": there is none
    state: str = ""

    @property
    def stuck_s(self) -> float:
        return self.beat.stuck_s + self.age_s


def allowed(
    phase: str, rounds: str, recent: Sequence[float], longest: Mapping[str, float], patient: bool
) -> tuple[float, float]:
    """(usual seconds of a round, seconds that the present phase may take). `rounds`: the name of
    the phase in which rounds follow each other; `patient`: among short rounds long ones are to be
    expected, and a line that names nobody's mistake is noise."""
    ordered = sorted(recent)
    usual = ordered[len(ordered) // 2] if ordered else 0.0
    if phase != rounds:
        return usual, max(SHORT_S, 2 * longest[phase]) if phase in longest else LONG_S
    if len(ordered) < KNOWN_ROUNDS:
        return usual, LONG_S
    long = ordered[-1 - len(ordered) // 10]  # one in ten may be a stall that is over
    return usual, max(long, longest.get(rounds, 0.0)) if patient else long


def numbers(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0, 1; ranks 0-2, 5."""
    spans: list[list[int]] = []
    for r in sorted(ranks):
        if spans and r == spans[-1][-1] + 1:
            spans[-1].append(r)
        else:
            spans.append([r])
    texts = [f"{s[0]}-{s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
