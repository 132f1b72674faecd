"""The ledger's arithmetic: samples, pushes, steps of elastic workers, recovery, the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli.chaos.faults import parse_fault
from manyhands.cli.chaos.injector import CoordinatorReport, Injected
from manyhands.cli.chaos.ledger import (
    EpochSamples,
    Ledger,
    RankRecord,
    RunKind,
    count_done_samples,
    count_pushes,
    count_samples,
    make_ledger,
    read_ledgers,
    recovery_s,
)
from manyhands.cli.chaos.report import lines


def record(rank: int = 0, steps: Any = (), **more: Any) -> RankRecord:
    """Steps are numbers of an epoch of two steps, with 8 samples each."""
    rows = [(step // 2, step, step + 1, 8) for step in steps]
    given = {"rounds_s": [], "metrics": {}, "acknowledged": [5, 5], **more}
    return RankRecord(rank, 2, rows, **given)


# -- samples --


def test_in_lock_step_a_sample_counts_once_where_every_rank_has_computed_the_step_once() -> None:
    calm = [record(0, range(4)), record(1, range(4))]
    assert count_samples(calm, calm, shared=False) == [
        EpochSamples(0, once=16),
        EpochSamples(1, once=16),
    ]
    torn = [record(0, [0, 1, 2, 3]), record(1, [0, 1, 1, 3])]
    assert count_samples(calm, torn, shared=False) == [
        EpochSamples(0, once=8, twice=8),
        EpochSamples(1, once=8, never=8),
    ]


def test_claimed_steps_count_once_where_one_rank_has_computed_them() -> None:
    calm = [record(0, [0, 1]), record(1, [2, 3])]
    assert count_samples(calm, [record(0, [2, 0]), record(1, [1, 3])], shared=True) == [
        EpochSamples(0, once=16),
        EpochSamples(1, once=16),
    ]
    assert count_samples(calm, [record(0, [0, 1]), record(1, [1, 2])], shared=True) == [
        EpochSamples(0, once=8, twice=8),
        EpochSamples(1, once=8, never=8),
    ]


def test_steps_beyond_the_undisturbed_run_are_too_many() -> None:
    calm = [record(0, [0, 1])]
    assert count_samples(calm, [record(0, [0, 1, 2])], shared=True)[1] == EpochSamples(1, twice=8)


def test_of_elastic_workers_all_steps_below_the_last_sync_point_are_done() -> None:
    calm = [record(0, [0, 3]), record(1, [1, 2])]
    assert count_done_samples(calm, 4) == [EpochSamples(0, 16), EpochSamples(1, 16)]
    assert count_done_samples(calm, 3) == [EpochSamples(0, 16), EpochSamples(1, 8, never=8)]


# -- pushes --


def test_what_was_acknowledged_is_applied_once() -> None:
    records = [record(0, acknowledged=[5, 5], applied=[11, 9], commits=0), record(1)]
    first, second = count_pushes(records)
    assert (first.acknowledged, first.applied, first.lost) == (10, 11, -1)
    assert (second.acknowledged, second.applied, second.lost) == (10, 9, 1)


def test_a_commit_counts_as_one_push() -> None:
    records = [record(0, acknowledged=[0, 0], applied=[7, 6], commits=7), record(1)]
    records[1] = record(1, acknowledged=[0, 0], commits=6)
    assert [of.lost for of in count_pushes(records)] == [0, 1]


def test_where_nobody_could_ask_nothing_is_said_to_be_lost() -> None:
    assert [(of.applied, of.lost) for of in count_pushes([record(0)])] == [(None, 0)] * 2


def test_of_elastic_workers_steps_are_counted_since_acknowledgements_die_with_them() -> None:
    asked = {"applied": [6, 6], "steps_applied": [8, 9], "ended_at": 8}
    counted = count_pushes([record(0, acknowledged=[3, 3], **asked)], elastic=True)
    assert [(of.steps, of.steps_applied, of.lost) for of in counted] == [(8, 8, 0), (8, 9, -1)]


def test_commits_of_elastic_workers_are_counted_as_pushes() -> None:
    asked = {"acknowledged": [0], "applied": [4], "steps_applied": [0], "commits": 4}
    (counted,) = count_pushes([record(0, **asked)], elastic=True)
    assert counted.steps is None and counted.lost == 0


# -- recovery --


def test_recovery_is_to_the_end_of_the_first_round_that_began_after_the_fault() -> None:
    fast, slow = record(0, rounds_s=[1.0, 2.0, 3.5]), record(1, rounds_s=[1.0, 2.0, 5.0])
    assert recovery_s([fast, slow], 1.5) == 3.5
    assert recovery_s([fast], 1.5) == 2.0
    assert recovery_s([fast, slow], 2.5) is None, "no round began after it"
    late = record(1, rounds_s=[9.0, 10.0, 11.0])  # joined in place of the one that was killed
    assert recovery_s([fast, late], 1.5) == 2.0


# -- files --


def test_the_two_processes_of_a_rank_count_together(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir()
    for n, steps in enumerate([[[0, 0, 1, 8]], [[0, 1, 2, 8]]]):
        raw = {"rank": 0, "size": 1, "steps": steps, "rounds_s": [n], "metrics": {"loss": n}}
        raw |= {"failure": "" if n else "lost", "acknowledged": [3 + n], "commits": 2}
        (folder / f"rank-0.{n}.json").write_text(json.dumps(raw))
    (found,) = read_ledgers(tmp_path)
    assert found.steps == [(0, 0, 1, 8), (0, 1, 2, 8)] and found.acknowledged == [7]
    assert found.commits == 4 and found.metrics == {"loss": 1} and not found.failure
    assert read_ledgers(tmp_path, elastic=True)[0].commits == 2, "one coordinator counted both"


# -- verdict --


def verdict(
    chaos: list[RankRecord], exit_code: int = 0, time_s: float | None = 101.0, **report: Any
) -> Ledger:
    calm = [record(0, [0, 1], metrics={"loss": 0.5}), record(1, [0, 1])]
    fault = Injected(parse_fault("kill", "server@1s"), 1.0, time_s, "server 1 (pid 9)")
    fault.why = "" if time_s else "the run had ended before"
    return make_ledger(
        calm,
        chaos,
        [fault],
        CoordinatorReport(**report),
        began_s=100.0,
        exit_code=exit_code,
        seconds=(2.0, 3.0),
        kind=RunKind(),
    )


def good(**more: Any) -> list[RankRecord]:
    first = {"applied": [10, 10], "metrics": {"loss": 0.75}, "rounds_s": [100.5, 101.5, 102.5]}
    return [record(0, [0, 1], **{**first, **more}), record(1, [0, 1])]


def test_a_run_that_lost_nothing() -> None:
    ledger = verdict(good(), losses=[(1, "its process ended")], copies=[(0, 2, 0.5, 1000)])
    assert ledger.problems == [] and json.loads(ledger.to_json())["lost_nothing"] is True
    assert ledger.metrics == {"loss": (0.5, 0.75)}
    text = "\n".join(lines(ledger))
    for part in (
        "kill server@1s  server 1 (pid 9)  1.0 s  1.5 s",
        "1      16            0      0",
        "0      10                   0        10       0",
        "loss    0.5000       0.7500     +0.25",
        "server 1 was lost: its process ended",
        "shard 0 was copied to server 2: 1.0 kB in 0.5 s",
        "NOTHING WAS LOST",
    ):
        assert part in text, text


@pytest.mark.parametrize(
    ("chaos", "more", "says"),
    [
        (good(applied=[10, 8]), {}, "shard 1: 2 pushes were acknowledged and are not applied"),
        (good(applied=[12, 10]), {}, "shard 0: 2 pushes too many are applied"),
        (good(applied=[]), {}, "nobody could ask how many pushes are applied"),
        (good()[:1], {}, "rank 1 left no ledger"),
        ([record(0, [0], applied=[10, 10]), record(1, [0])], {}, "8 samples were never computed"),
        ([record(0, [0, 1, 1], applied=[10, 10]), record(1, [0, 1])], {}, "computed twice"),
        (good(failure="ServerLost: gone"), {"exit_code": 2}, "exit code 2: ServerLost: gone"),
        (good(), {"lost_shards": {1}}, "shard 1: no server has it any more, and 10 acknowledged"),
        (good(), {"time_s": None}, "kill server@1s was not injected: the run had ended before"),
    ],
)
def test_what_was_lost_is_named(chaos: list[RankRecord], more: dict[str, Any], says: str) -> None:
    ledger = verdict(chaos, **more)
    assert any(says in problem for problem in ledger.problems), ledger.problems
    head = "NOT PROVEN:" if "not injected" in says else "LOST:"
    assert head in lines(ledger) and json.loads(ledger.to_json())["lost_nothing"] is False
