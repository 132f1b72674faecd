"""Ledger of two runs between ranks: samples, recovery, members and metrics, against each other."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.cli.chaos.injector import Injected
from manyhands.cli.chaos.ledger import FaultRecord, Ledger, lost_samples
from manyhands.cli.chaos.rank_history import (
    MemberEpoch,
    count_intervals,
    news,
    recovery_s,
    trace,
)

MOST_NAMED = 10  # problems of rounds; more would hide the others


def make_rank_ledger(
    calm: Sequence[MemberEpoch],
    chaos: Sequence[MemberEpoch],
    injected: Sequence[Injected],
    *,
    began_s: float,
    exit_code: int,
    seconds: tuple[float, float],
    left: Sequence[str] = (),
) -> Ledger:
    """`left`: by a launcher that was killed."""
    faults = []
    for each in injected:
        done = each.time_s is not None
        at_s = each.at_s if each.time_s is None else each.time_s - began_s
        after = None if each.time_s is None else recovery_s(chaos, each.time_s, each.lost)
        faults.append(FaultRecord(str(each.fault), each.target, at_s, after, done, each.why))
    wanted, got = trace(calm), trace(chaos)
    before, after_all = _metrics(calm), _metrics(chaos)
    ledger = Ledger(
        exit_code,
        *seconds,
        faults,
        count_intervals(wanted.intervals, got.intervals),
        [],
        [],
        [],
        news(chaos, got.again),
        {name: (before[name], after_all[name]) for name in before if name in after_all},
        between_ranks=True,
    )
    ledger.problems = [
        *_unfinished(exit_code, chaos),
        *left,
        *_some(got.problems),
        *lost_samples(ledger),
        *(f"{f.fault} was not injected: {f.why}" for f in faults if not f.injected),
    ]
    return ledger


def _metrics(epochs: Sequence[MemberEpoch]) -> dict[str, float]:
    return next((p.metrics for e in epochs[-1:] for p in e.parts if p.metrics is not None), {})


def _unfinished(exit_code: int, epochs: Sequence[MemberEpoch]) -> list[str]:
    if exit_code:
        failures = [p.failure.splitlines()[0] for e in epochs for p in e.parts if p.failure]
        why = f": {failures[-1]}" if failures else ""
        return [f"the run did not finish, it ended with exit code {exit_code}{why}"]
    if not any(p.metrics is not None for e in epochs[-1:] for p in e.parts):
        return ["no rank left a log that says how the run ended"]
    return []


def _some(problems: list[str]) -> list[str]:
    more = len(problems) - MOST_NAMED
    return problems if more <= 0 else [*problems[:MOST_NAMED], f"and {more} rounds more"]
