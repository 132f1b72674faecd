"""Ledger of two runs: what the disturbed one computed and applied, against the undisturbed one.

    samples   of each step that the undisturbed run has computed: once, twice or never
    pushes    of each shard: acknowledged to workers + commits = applied; each exactly once
    recovery  from a fault to the end of the first round that began after it, on the slowest rank

`problems` says in sentences what was lost or counted twice.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from manyhands.assembly.chaos.rank_ledger import FOLDER
from manyhands.cli.chaos.injector import CoordinatorReport, Injected

Step = tuple[int, int, int]  # epoch, first step of a round, step after its last


@dataclass(frozen=True)
class RankRecord:
    """What one rank left in RUN/ledger."""

    rank: int
    size: int
    steps: list[tuple[int, int, int, int]]  # of each round: its `Step`, and samples
    rounds_s: list[float]
    metrics: dict[str, float]
    failure: str = ""
    acknowledged: list[int] = field(default_factory=list)  # by shard
    applied: list[int] = field(default_factory=list)  # by shard; rank 0 has asked
    commits: int = 0


def read_ledgers(run: Path) -> list[RankRecord]:
    """Those that are there, by rank."""
    found = []
    for path in sorted((run / FOLDER).glob("rank-*.json")):
        raw = json.loads(path.read_text())
        raw["steps"] = [tuple(step) for step in raw["steps"]]
        found.append(RankRecord(**raw))
    return sorted(found, key=lambda record: record.rank)


# -- samples --


@dataclass
class EpochSamples:
    """Samples of one epoch, by how often they were computed."""

    epoch: int
    once: int = 0
    twice: int = 0  # or more often
    never: int = 0


def count_samples(
    calm: Sequence[RankRecord], chaos: Sequence[RankRecord], shared: bool
) -> list[EpochSamples]:
    """`shared`: each step is of one rank. Otherwise all ranks take part in each, and its samples
    count as computed once where every rank has computed its part once."""
    wanted: dict[Step, int] = {}
    for record in calm:
        for epoch, first, stop, samples in record.steps:
            wanted[epoch, first, stop] = samples
    counts = [Counter((e, a, b) for e, a, b, _ in record.steps) for record in chaos]
    extra = {
        (e, a, b): samples
        for record in chaos
        for e, a, b, samples in record.steps
        if (e, a, b) not in wanted
    }
    found: dict[int, EpochSamples] = {}
    for step, samples in {**wanted, **extra}.items():
        of = found.setdefault(step[0], EpochSamples(step[0]))
        times = [count[step] for count in counts]
        least = sum(times) if shared else min(times, default=0)
        most = sum(times) if shared else max(times, default=0)
        if least == 0:
            of.never += samples
        elif most > 1 or step in extra:
            of.twice += samples
        else:
            of.once += samples
    return [found[epoch] for epoch in sorted(found)]


# -- pushes --


@dataclass
class ShardPushes:
    """Pushes to one shard, of all ranks."""

    shard: int
    acknowledged: int
    commits: int
    applied: int | None  # None: nobody could ask

    @property
    def lost(self) -> int:
        """More than 0: acknowledged and not applied; less: applied twice."""
        return 0 if self.applied is None else self.acknowledged + self.commits - self.applied


def count_pushes(records: Sequence[RankRecord]) -> list[ShardPushes]:
    shards = max((len(record.acknowledged) for record in records), default=0)
    commits = max((record.commits for record in records), default=0)
    applied = next((record.applied for record in records if record.applied), None)
    return [
        ShardPushes(
            shard,
            sum(record.acknowledged[shard] for record in records),
            commits,
            None if applied is None else applied[shard],
        )
        for shard in range(shards)
    ]


# -- recovery --


def recovery_s(records: Sequence[RankRecord], time_s: float) -> float | None:
    """From a fault to the end of the first round that began after it, on the slowest rank; None:
    there was none."""
    found = []
    for record in records:
        under_way = bisect.bisect_right(record.rounds_s, time_s)
        if under_way + 1 >= len(record.rounds_s):
            return None
        found.append(record.rounds_s[under_way + 1] - time_s)
    return max(found, default=None)


# -- the whole --


@dataclass
class FaultRecord:
    fault: str
    target: str
    at_s: float  # after training began; when it was due, where it was not injected
    recovery_s: float | None
    injected: bool
    why: str = ""


@dataclass
class Ledger:
    """`exit_code`, `calm_s` and `chaos_s` are of the disturbed run, and the runs' durations."""

    exit_code: int
    calm_s: float
    chaos_s: float
    faults: list[FaultRecord]
    samples: list[EpochSamples]
    pushes: list[ShardPushes]
    losses: list[tuple[int, str]]
    copies: list[tuple[int, int, float, int]]
    metrics: dict[str, tuple[float, float]]  # undisturbed, disturbed
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "lost_nothing": not self.problems}, indent=1) + "\n"


def make_ledger(
    calm: Sequence[RankRecord],
    chaos: Sequence[RankRecord],
    injected: Sequence[Injected],
    report: CoordinatorReport,
    *,
    began_s: float,
    exit_code: int,
    seconds: tuple[float, float],
    shared: bool,
    leaves_out: bool,
) -> Ledger:
    """`leaves_out`: the strategy goes on without late batches, so that some are never computed."""
    faults = []
    for each in injected:
        at_s = each.at_s if each.time_s is None else each.time_s - began_s
        after = None if each.time_s is None else recovery_s(chaos, each.time_s)
        done = each.time_s is not None
        faults.append(FaultRecord(str(each.fault), each.target, at_s, after, done, each.why))
    before, after_all = _metrics(calm), _metrics(chaos)
    ledger = Ledger(
        exit_code,
        *seconds,
        faults,
        count_samples(calm, chaos, shared),
        count_pushes(chaos),
        report.losses,
        report.copies,
        {name: (before[name], after_all[name]) for name in before if name in after_all},
    )
    ledger.problems = [
        *_unfinished(ledger, chaos, len(calm)),
        *(f"shard {shard}: no server has it any more" for shard in sorted(report.lost_shards)),
        *_lost(ledger, leaves_out),
        *(f"{f.fault} was not injected: {f.why}" for f in faults if not f.injected),
    ]
    return ledger


def _metrics(records: Sequence[RankRecord]) -> Mapping[str, float]:
    return records[0].metrics if records else {}


def _unfinished(ledger: Ledger, records: Sequence[RankRecord], ranks: int) -> list[str]:
    found = []
    if ledger.exit_code:
        failures = list(dict.fromkeys(r.failure.splitlines()[0] for r in records if r.failure))
        why = f": {failures[0]}" if failures else ""
        found.append(f"the run did not finish, it ended with exit code {ledger.exit_code}{why}")
    there = {record.rank for record in records}
    if missing := [str(rank) for rank in range(ranks) if rank not in there]:
        found.append(f"rank {', '.join(missing)} left no ledger of what it did")
    return found


def _lost(ledger: Ledger, leaves_out: bool) -> list[str]:
    found = []
    for of in ledger.samples:
        if of.never and not leaves_out:
            found.append(f"epoch {of.epoch + 1}: {of.never} samples were never computed")
        if of.twice:
            found.append(f"epoch {of.epoch + 1}: {of.twice} samples were computed twice")
    for shard in ledger.pushes:
        what = f"shard {shard.shard}: {abs(shard.lost)} pushes"
        if shard.lost > 0:
            found.append(f"{what} were acknowledged and are not applied")
        elif shard.lost < 0:
            found.append(f"{what} too many are applied")
        elif shard.applied is None and not ledger.exit_code:
            found.append(f"shard {shard.shard}: nobody could ask how many pushes are applied")
    return found
