"""Ledger of two runs: what the disturbed one computed and applied, against the undisturbed one.

    samples   of each step that the undisturbed run has computed: once, twice or never
    pushes    of each shard: acknowledged to workers + commits = applied; each exactly once
    steps     of each shard, where workers are elastic: those of the run = those applied there.
              What a dead worker had computed or heard acknowledged, nobody knows; but every step
              below the last sync point was reported as done once, and counts once on every shard
    recovery  from a fault to the end of the first round that began after it, on the slowest rank

`problems` says in sentences what was lost or counted twice.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from manyhands.assembly.chaos.rank_ledger import FOLDER
from manyhands.cli.chaos.injector import CoordinatorReport, Injected
from manyhands.cli.chaos.sample_counts import EpochSamples

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
    steps_applied: list[int] = field(default_factory=list)  # by shard, where ranks are elastic
    ended_at: int = 0  # the step up to which all ranks have computed


def read_ledgers(run: Path, elastic: bool = False) -> list[RankRecord]:
    """Those that are there, by rank; of a rank that was started again, both together."""
    found: dict[int, RankRecord] = {}
    for path in sorted((run / FOLDER).glob("rank-*.json"), key=lambda p: p.stat().st_mtime_ns):
        raw = json.loads(path.read_text())
        raw["steps"] = [tuple(step) for step in raw["steps"]]
        record = RankRecord(**raw)
        earlier = found.get(record.rank)
        found[record.rank] = _together(earlier, record, elastic)
    return [found[rank] for rank in sorted(found)]


def _together(earlier: RankRecord | None, later: RankRecord, elastic: bool) -> RankRecord:
    """One rank, two processes. Elastic ones have one coordinator, which counts all commits."""
    if earlier is None:
        return later
    both = zip(earlier.acknowledged, later.acknowledged, strict=False)
    commits = earlier.commits, later.commits
    return replace(
        later,
        steps=earlier.steps + later.steps,
        rounds_s=earlier.rounds_s + later.rounds_s,
        acknowledged=[a + b for a, b in both],
        commits=max(commits) if elastic else sum(commits),
    )


# -- samples --


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


def count_done_samples(calm: Sequence[RankRecord], ended_at: int) -> list[EpochSamples]:
    """Of elastic ranks: all steps below the last sync point were reported as done, each once."""
    found: dict[int, EpochSamples] = {}
    for record in calm:
        for epoch, _, stop, samples in record.steps:
            of = found.setdefault(epoch, EpochSamples(epoch))
            done = stop <= ended_at
            of.once, of.never = of.once + samples * done, of.never + samples * (not done)
    return [found[epoch] for epoch in sorted(found)]


# -- pushes --


@dataclass
class ShardPushes:
    """Pushes to one shard, of all ranks; of elastic ranks, their steps."""

    shard: int
    acknowledged: int
    commits: int
    applied: int | None  # None: nobody could ask
    steps: int | None = None  # of the run; None: pushes are counted, not steps
    steps_applied: int | None = None

    @property
    def lost(self) -> int:
        """More than 0: acknowledged and not applied; less: applied twice."""
        if self.applied is None:
            return 0
        if self.steps is not None:
            return self.steps - (self.steps_applied or 0)
        return self.acknowledged + self.commits - self.applied


def count_pushes(records: Sequence[RankRecord], elastic: bool = False) -> list[ShardPushes]:
    """Of elastic ranks steps are counted, unless commits are: acknowledgements die with a rank."""
    asked = next((record for record in records if record.applied), None)
    commits = max((record.commits for record in records), default=0)
    found = []
    for shard in range(max((len(record.acknowledged) for record in records), default=0)):
        heard = sum(record.acknowledged[shard] for record in records if record.acknowledged)
        of = ShardPushes(shard, heard, commits, None if asked is None else asked.applied[shard])
        if elastic and not commits and asked is not None:
            of.steps, of.steps_applied = asked.ended_at, asked.steps_applied[shard]
        found.append(of)
    return found


# -- recovery --


def recovery_s(records: Sequence[RankRecord], time_s: float) -> float | None:
    """From a fault to the end of the first round that began after it, on the slowest rank; None:
    there was none."""
    found = []
    for record in records:
        under_way = bisect.bisect_right(record.rounds_s, time_s)
        if under_way and under_way + 1 < len(record.rounds_s):  # it was there, and went on
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
    workers: list[str]  # that were lost, and that joined
    metrics: dict[str, tuple[float, float]]  # undisturbed, disturbed
    problems: list[str] = field(default_factory=list)
    between_ranks: bool = False  # without servers, so without pushes

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "lost_nothing": not self.problems}, indent=1) + "\n"


@dataclass(frozen=True)
class RunKind:
    """What a strategy makes of steps and pushes."""

    shared: bool = False  # each step is of one rank
    elastic: bool = False
    leaves_out: bool = False  # it goes on without late batches: some are never computed
    counted: bool = True  # False: nobody can say which pushes of a dead rank arrived


def make_ledger(
    calm: Sequence[RankRecord],
    chaos: Sequence[RankRecord],
    injected: Sequence[Injected],
    report: CoordinatorReport,
    *,
    began_s: float,
    exit_code: int,
    seconds: tuple[float, float],
    kind: RunKind,
    workers: Sequence[str] = (),
) -> Ledger:
    faults = []
    for each in injected:
        at_s = each.at_s if each.time_s is None else each.time_s - began_s
        after = None if each.time_s is None else recovery_s(chaos, each.time_s)
        done = each.time_s is not None
        faults.append(FaultRecord(str(each.fault), each.target, at_s, after, done, each.why))
    before, after_all = _metrics(calm), _metrics(chaos)
    ended_at = max((record.ended_at for record in chaos), default=0)
    ledger = Ledger(
        exit_code,
        *seconds,
        faults,
        count_done_samples(calm, ended_at)
        if kind.elastic
        else count_samples(calm, chaos, kind.shared),
        count_pushes(chaos, kind.elastic) if kind.counted else [],
        report.losses,
        report.copies,
        list(workers),
        {name: (before[name], after_all[name]) for name in before if name in after_all},
    )
    ledger.problems = [
        *_unfinished(ledger, chaos, 1 if kind.elastic else len(calm)),
        *(_lost_shard(shard, ledger) for shard in sorted(report.lost_shards)),
        *_lost(ledger, kind.leaves_out),
        *(f"{f.fault} was not injected: {f.why}" for f in faults if not f.injected),
    ]
    return ledger


def _metrics(records: Sequence[RankRecord]) -> Mapping[str, float]:
    return next((record.metrics for record in records if not record.failure), {})


def _unfinished(ledger: Ledger, records: Sequence[RankRecord], ranks: int) -> list[str]:
    found = []
    if ledger.exit_code:
        failures = list(dict.fromkeys(r.failure.splitlines()[0] for r in records if r.failure))
        why = f": {failures[0]}" if failures else ""
        found.append(f"the run did not finish, it ended with exit code {ledger.exit_code}{why}")
    elif len(records) < ranks:
        there = {record.rank for record in records}
        missing = ", ".join(str(rank) for rank in range(ranks) if rank not in there)
        found.append(f"rank {missing} left no ledger of what it did")
    return found


def _lost_shard(shard: int, ledger: Ledger) -> str:
    pushes = sum(of.acknowledged for of in ledger.pushes if of.shard == shard)
    return f"shard {shard}: no server has it any more, and {pushes} acknowledged pushes with it"


def lost_samples(ledger: Ledger, leaves_out: bool = False) -> list[str]:
    found = []
    for of in ledger.samples:
        if of.never and not leaves_out:
            found.append(f"epoch {of.epoch + 1}: {of.never} samples were never computed")
        if of.twice:
            found.append(f"epoch {of.epoch + 1}: {of.twice} samples were computed twice")
    return found


def _lost(ledger: Ledger, leaves_out: bool) -> list[str]:
    found = lost_samples(ledger, leaves_out)
    for shard in ledger.pushes:
        unit = "pushes" if shard.steps is None else "steps"
        what = f"shard {shard.shard}: {abs(shard.lost)} {unit}"
        if shard.lost > 0:
            done = "acknowledged" if shard.steps is None else "done"
            found.append(f"{what} were {done} and are not applied")
        elif shard.lost < 0:
            found.append(f"{what} too many are applied")
        elif shard.applied is None and not ledger.exit_code:
            found.append(f"shard {shard.shard}: nobody could ask how many pushes are applied")
    return found
