"""History of a run between ranks: the rounds that its model is made of, out of its round logs.

Ranks train in membership epochs, one after the other. Each goes on after a round r that all of its
ranks had kept, or that a checkpoint holds; what was computed after r before is computed again:

    epoch 1   1 2 3 4 5 6 7          the model is made of 1 2 3 4 of epoch 1,
    epoch 2           5 6 7 8 9      5 6 7 of epoch 2 and 8 ... of epoch 3
    epoch 3                 8 ...

A round of the history counts once where it follows on the one before, every rank of its epoch has
computed it once, and the ranks' shares add up to its samples. A rank that was killed may lack its
last rounds: the others went on from a boundary that all had reached.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.assembly.chaos.round_log import FOLDER, PREFIX
from manyhands.cli.chaos.sample_counts import EpochSamples

At = tuple[int, int, int]  # epoch of the data, offset in it, step
Interval = tuple[int, int, int]  # epoch of the data, first offset, offset after the last


@dataclass(frozen=True)
class RoundRecord:
    """One round of one rank. `own` and `total`: samples of its last step."""

    round: int
    time_s: float
    before: At
    after: At
    own: int
    total: int


@dataclass
class RankPart:
    """What one process did in one membership epoch."""

    start: int  # pid of the launcher
    epoch: int
    members: tuple[int, ...]
    rank: int
    replica: int
    replicas: int
    split: bool  # replicas share the samples of a step
    round: int  # after which the epoch goes on
    at: At
    samples: int | None  # of an epoch of the data
    pid: int
    host: str
    why: str
    time_s: float
    rounds: list[RoundRecord] = field(default_factory=list)
    metrics: dict[str, float] | None = None  # None: it did not come to the end
    failure: str = ""

    @property
    def member(self) -> int:
        return self.members[self.rank]


@dataclass
class MemberEpoch:
    """A membership epoch, and what its ranks did."""

    parts: list[RankPart]

    @property
    def first(self) -> RankPart:
        return self.parts[0]

    @property
    def key(self) -> tuple[int, int]:
        return self.first.start, self.first.epoch

    def by_round(self) -> dict[int, list[tuple[RankPart, list[RoundRecord]]]]:
        """Of each round, the ranks that have computed it, and their records: one each."""
        found: dict[int, list[tuple[RankPart, list[RoundRecord]]]] = {}
        for part in self.parts:
            for record in part.rounds:
                ranks = found.setdefault(record.round, [])
                if not ranks or ranks[-1][0] is not part:
                    ranks.append((part, []))
                ranks[-1][1].append(record)
        return found

    def __str__(self) -> str:
        return f"epoch {self.first.epoch} of the ranks"


# -- files --


def read_history(run: Path) -> list[MemberEpoch]:
    """Membership epochs of a run and of those that resumed it, in order."""
    found: dict[tuple[int, int], MemberEpoch] = {}
    for path in sorted((run / FOLDER).glob(f"{PREFIX}*.jsonl")):
        for part in read_parts(path.read_text().splitlines()):
            found.setdefault((part.start, part.epoch), MemberEpoch([])).parts.append(part)
    for epoch in found.values():
        epoch.parts.sort(key=lambda p: p.rank)
    began: dict[int, float] = {}
    for (start, _), epoch in found.items():
        time_s = min(p.time_s for p in epoch.parts)
        began[start] = min(time_s, began.get(start, time_s))
    return sorted(found.values(), key=lambda e: (began[e.key[0]], e.key[1]))


def read_parts(lines: Iterable[str]) -> list[RankPart]:
    """Of one process. A last line that is not complete is left out."""
    parts: list[RankPart] = []
    for line in lines:
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if "begin" in found:
            begin = found["begin"]
            more = {"members": tuple(begin["members"]), "at": tuple(begin["at"])}
            parts.append(RankPart(**{**begin, **more}))
        elif "round" in found:
            places = {k: tuple(found[k]) for k in ("before", "after")}
            parts[-1].rounds.append(RoundRecord(**{**found, **places}))
        elif "end" in found:
            parts[-1].metrics = found["end"]
        elif "failure" in found:
            parts[-1].failure = found["failure"]
    return parts


def present_ranks(run: Path) -> dict[int, RankPart]:
    """By rank, those of the newest epoch that has computed a round."""
    epochs = read_history(run)
    return {part.rank: part for part in epochs[-1].parts} if epochs else {}


# -- the history --


@dataclass
class RunHistory:
    """Rounds of the model, each with its epoch; `problems`: what does not fit together."""

    rounds: dict[int, MemberEpoch] = field(default_factory=dict)
    again: dict[tuple[int, int], int] = field(default_factory=dict)  # rounds computed again
    intervals: list[Interval] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def trace(epochs: Sequence[MemberEpoch]) -> RunHistory:
    found = RunHistory()
    for epoch in epochs:
        begin = epoch.first.round
        if any((p.round, p.at) != (begin, epoch.first.at) for p in epoch.parts):
            found.problems.append(f"ranks do not agree on where {epoch} began")
        dropped = [r for r in found.rounds if r > begin]
        found.again[epoch.key] = len(dropped)
        for round in dropped:
            del found.rounds[round]
        found.rounds |= dict.fromkeys(epoch.by_round(), epoch)
    at: At | None
    records_of = {e.key: e.by_round() for e in epochs}
    following = dict(zip((e.key for e in epochs), [*epochs[1:], None], strict=False))
    expected, at = 1, (0, 0, 0)
    for round, epoch in sorted(found.rounds.items()):
        if round != expected:
            missing = f"{expected} to {round - 1}" if round - 1 > expected else str(expected)
            found.problems.append(f"round {missing}: nobody has computed it")
            at = None
        of = records_of[epoch.key][round]
        records = _whole(round, of, epoch, following[epoch.key], found.problems)
        before, after = (records[0].before, records[0].after) if records else (None, None)
        if at is not None and before is not None and before != at:
            found.problems.append(
                f"round {round} begins at sample {before[1]} of epoch {before[0] + 1}, the one "
                f"before ended at sample {at[1]} of epoch {at[0] + 1}"
            )
        for record in records:  # one, or a round that was computed twice
            found.intervals += _intervals(record, epoch.first.samples)
        expected, at = round + 1, after
    return found


def _whole(
    round: int,
    found: list[tuple[RankPart, list[RoundRecord]]],
    epoch: MemberEpoch,
    after: MemberEpoch | None,
    problems: list[str],
) -> list[RoundRecord]:
    """Records of a round that all ranks have computed: one, more where one has computed it more
    often; none where it is not complete."""
    first = found[0][1][0]
    there = {part.member for part, _ in found}
    # killed, or left: it took part in the exchange that settled the boundary, or there was none
    excused = set(epoch.first.members) - _staying(epoch, after)
    missing = [m for m in epoch.first.members if m not in there and m not in excused]
    if missing:
        ranks = ", ".join(str(epoch.first.members.index(m)) for m in missing)
        problems.append(f"round {round} of {epoch}: rank {ranks} has not computed it")
        return []
    if any((r.before, r.after) != (first.before, first.after) for _, rs in found for r in rs):
        problems.append(f"round {round} of {epoch}: ranks computed different steps")
        return []
    own = {part.replica: rounds[0].own for part, rounds in found}
    if epoch.first.split and len(own) == epoch.first.replicas and sum(own.values()) != first.total:
        problems.append(
            f"round {round} of {epoch}: the ranks' shares of its last step are "
            f"{sum(own.values())} of {first.total} samples"
        )
    return [first] * max(len(rounds) for _, rounds in found)


def _staying(epoch: MemberEpoch, after: MemberEpoch | None) -> set[int]:
    if after is None:
        return set(epoch.first.members)
    return set(after.first.members) if after.key[0] == epoch.key[0] else set()


def _intervals(record: RoundRecord, samples: int | None) -> list[Interval]:
    (epoch, offset, _), (last, stop, _) = record.before, record.after
    found = []
    while epoch < last:
        end = offset + record.total if samples is None else samples
        found.append((epoch, offset, end))
        epoch, offset = epoch + 1, 0
    return [*found, (epoch, offset, stop)] if stop > offset else found


def count_intervals(calm: Sequence[Interval], chaos: Sequence[Interval]) -> list[EpochSamples]:
    """By epoch of the data: samples that the undisturbed run has computed, and how often the
    disturbed one has."""
    found = []
    for epoch in sorted({e for e, _, _ in [*calm, *chaos]}):
        wanted, got = (_edges(each, epoch) for each in (calm, chaos))
        of = EpochSamples(epoch)
        edges = sorted({*wanted, *got})
        planned = times = 0
        for here, there in zip(edges, [*edges[1:], edges[-1]], strict=True):
            planned, times = planned + wanted[here], times + got[here]
            if times > 1 or (times and not planned):
                of.twice += there - here
            elif times:
                of.once += there - here
            elif planned:
                of.never += there - here
        found.append(of)
    return found


def _edges(intervals: Sequence[Interval], epoch: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for of, first, stop in intervals:
        if of == epoch:
            found[first] += 1
            found[stop] -= 1
    return found


# -- times and members --


def recovery_s(epochs: Sequence[MemberEpoch], time_s: float, victims: set[int]) -> float | None:
    """From a fault to the end of the first round after it: of the epoch that goes on without the
    `victims` (pids), or, where none was lost, of a round that began after the fault; on the slowest
    rank. None: there was none."""
    lost = [e for e in epochs if any(p.pid in victims for p in e.parts)]
    if lost:
        later = epochs[epochs.index(lost[-1]) + 1 :]
        firsts = [[p.rounds[0].time_s for p in e.parts if p.rounds] for e in later]
        return max(next(filter(None, firsts), []), default=time_s) - time_s if any(firsts) else None
    found = []
    for epoch in epochs:
        for part in epoch.parts:
            ends = [r.time_s for r in part.rounds]
            after = [end for begun, end in itertools.pairwise(ends) if begun >= time_s]
            if ends and ends[0] < time_s and after:
                found.append(after[0] - time_s)
    return max(found, default=None)


def news(epochs: Sequence[MemberEpoch], again: Mapping[tuple[int, int], int]) -> list[str]:
    """Who has joined and left, epoch by epoch, as sentences."""
    found = []
    for before, epoch in itertools.pairwise(epochs):
        here, resumed = epoch.first, before.key[0] != epoch.key[0]
        joined = [p for p in epoch.parts if resumed or p.member not in before.first.members]
        left = [r for r, m in enumerate(before.first.members) if resumed or m not in here.members]
        ranks = f"{len(here.members)} rank{'s' * (len(here.members) != 1)}"
        said = [f"{epoch}, from round {here.round} on: {ranks}"]
        if resumed:
            said = [f"resumed at round {here.round} on {ranks}"]
        elif left:
            said.append(f"without what was rank {', '.join(map(str, left))}")
        if joined and not resumed:
            said.append("joined: " + ", ".join(f"rank {p.rank} (pid {p.pid})" for p in joined))
        if count := again.get(epoch.key):
            said.append(f"{count} round{'s' * (count != 1)} computed again")
        found.append("; ".join(said))
    return found
