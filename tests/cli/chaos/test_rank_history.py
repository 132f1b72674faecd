"""History of a run between ranks: what was rolled back does not count, what counts counts once."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli.chaos.faults import parse_fault
from manyhands.cli.chaos.injector import Injected
from manyhands.cli.chaos.ledger import Ledger
from manyhands.cli.chaos.rank_history import (
    MemberEpoch,
    RankPart,
    RoundRecord,
    count_intervals,
    news,
    read_history,
    recovery_s,
    trace,
)
from manyhands.cli.chaos.rank_verdict import make_rank_ledger
from manyhands.cli.chaos.report import lines
from manyhands.cli.chaos.sample_counts import EpochSamples

BATCH, SAMPLES = 6, 24  # so an epoch of the data has four rounds
ROUNDS = 8


def at(round: int) -> tuple[int, int, int]:
    epoch, step = divmod(round, SAMPLES // BATCH)
    return epoch, step * BATCH, round


def part(rank: int, members: tuple[int, ...], rounds: Any, epoch: int = 1, **more: Any) -> RankPart:
    """A rank that has computed these rounds, one a second; it shares each with all others."""
    size = len(members)
    records = [
        RoundRecord(r, 100.0 + r + epoch / 10, at(r - 1), at(r), BATCH // size, BATCH)
        for r in rounds
    ]
    begin = more.pop("begin", rounds[0] - 1 if rounds else 0)
    given: dict[str, Any] = {
        "start": 7,
        "pid": 1000 + members[rank],
        "host": "here",
        "why": "",
        "time_s": 100.0 + begin,
        **more,
    }
    return RankPart(
        epoch=epoch,
        members=members,
        rank=rank,
        replica=rank,
        replicas=size,
        split=True,
        round=begin,
        at=at(begin),
        samples=SAMPLES,
        rounds=records,
        **given,
    )


def whole(members: tuple[int, ...], rounds: Any, epoch: int = 1, **more: Any) -> MemberEpoch:
    return MemberEpoch([part(r, members, rounds, epoch, **more) for r in range(len(members))])


def rolled_back() -> list[MemberEpoch]:
    """Rank 1 of three dies in round 6; the others go on after round 3, and a new one joins."""
    first = whole((0, 1, 2), range(1, 7))
    first.parts[1] = part(1, (0, 1, 2), range(1, 6))  # it had not finished the last
    second = whole((0, 2), range(4, 7), epoch=2)
    third = whole((0, 3, 2), range(7, ROUNDS + 1), epoch=3, metrics={"loss": 0.5})
    return [first, second, third]


CALM = [whole((0, 1, 2), range(1, ROUNDS + 1), metrics={"loss": 0.25})]
ONCE = [EpochSamples(0, once=SAMPLES), EpochSamples(1, once=SAMPLES)]


def counted(epochs: list[MemberEpoch]) -> tuple[list[EpochSamples], list[str]]:
    found = trace(epochs)
    return count_intervals(trace(CALM).intervals, found.intervals), found.problems


def test_rounds_that_were_computed_again_count_once() -> None:
    assert counted(CALM) == (ONCE, [])
    assert counted(rolled_back()) == (ONCE, [])
    assert trace(rolled_back()).again == {(7, 1): 0, (7, 2): 3, (7, 3): 0}


def test_a_killed_rank_may_lack_its_last_rounds_where_the_others_went_on() -> None:
    epochs = rolled_back()
    epochs[0].parts[1] = part(1, (0, 1, 2), range(1, 3))
    assert counted(epochs) == (ONCE, [])
    epochs = rolled_back()
    epochs[0].parts[2] = part(2, (0, 1, 2), range(1, 3))  # a survivor may not
    samples, problems = counted(epochs)
    assert samples[0] == EpochSamples(0, once=18, never=6)
    assert problems == ["round 3 of epoch 1 of the ranks: rank 2 has not computed it"]


def test_an_epoch_that_goes_on_too_early_or_too_late_is_found() -> None:
    """Its ranks say they went on after round 3, but the data went on elsewhere."""
    for shift, says in ((-1, "twice"), (1, "never")):
        epochs = rolled_back()[:1]
        second = whole((0, 2), range(4, ROUNDS + 1), epoch=2)
        for each in second.parts:
            each.rounds = [
                RoundRecord(r.round, r.time_s, at(r.round - 1 + shift), at(r.round + shift), 3, 6)
                for r in each.rounds
            ]
        samples, problems = counted([*epochs, second])
        assert getattr(samples[0], says) == BATCH, (says, samples)
        assert len(problems) == 1 and problems[0].startswith("round 4 begins at sample")


def test_a_round_twice_in_one_epoch_is_counted_twice() -> None:
    epochs = rolled_back()
    epochs[2].parts[0].rounds.append(epochs[2].parts[0].rounds[-1])
    assert counted(epochs)[0][1] == EpochSamples(1, once=18, twice=6)


def test_rounds_that_nobody_computed_are_never() -> None:
    epochs = [whole((0, 1), [1, 2]), whole((0,), [5, 6, 7, 8], epoch=2)]
    samples, problems = counted(epochs)
    assert samples == [EpochSamples(0, once=12, never=12), EpochSamples(1, once=24)]
    assert problems == ["round 3 to 4: nobody has computed it"]
    assert counted([whole((0, 1), range(1, 8))])[0][1] == EpochSamples(1, once=18, never=6)
    assert counted([whole((0, 1), range(1, 10))])[0][2] == EpochSamples(2, twice=6)


def test_shares_of_ranks_add_up_to_the_step() -> None:
    epochs = rolled_back()
    for each in epochs[1].parts:  # as if there were still three
        each.rounds = [RoundRecord(*[*asdict(r).values()][:4], 2, BATCH) for r in each.rounds]
    (first, *_) = trace(epochs).problems
    assert first == (
        "round 4 of epoch 2 of the ranks: the ranks' shares of its last step are 4 of 6 samples"
    )


def test_ranks_that_computed_different_steps_are_found() -> None:
    epochs = rolled_back()
    epochs[1].parts[1].rounds[0] = RoundRecord(4, 0.0, at(4), at(5), 3, 6)
    assert "round 4 of epoch 2 of the ranks: ranks computed different steps" in counted(epochs)[1]
    epochs[1].parts[1].round = 2
    assert "ranks do not agree on where epoch 2 of the ranks began" in counted(epochs)[1]


def test_ranks_that_hold_parts_of_one_replica_share_their_samples() -> None:
    one = whole((0, 1), range(1, ROUNDS + 1))
    for each in one.parts:
        each.replica, each.replicas = 0, 1
        each.rounds = [RoundRecord(*[*asdict(r).values()][:4], BATCH, BATCH) for r in each.rounds]
    assert counted([one]) == (ONCE, [])


def test_a_round_over_several_epochs_of_the_data() -> None:
    long = part(0, (0,), [1])
    long.rounds = [RoundRecord(1, 0.0, (0, 0, 0), (2, 6, 9), 6, 6)]
    assert trace([MemberEpoch([long])]).intervals == [(0, 0, 24), (1, 0, 24), (2, 0, 6)]


def test_a_resumed_run_goes_on_from_its_checkpoint() -> None:
    killed = whole((0, 1), range(1, 7))
    resumed = whole((0, 1), range(5, ROUNDS + 1), start=9, epoch=0, time_s=200.0)
    assert counted([killed, resumed]) == (ONCE, [])
    assert news([killed, resumed], trace([killed, resumed]).again) == [
        "resumed at round 4 on 2 ranks; 2 rounds computed again"
    ]


def test_recovery_is_to_the_first_round_without_the_one_that_was_killed() -> None:
    epochs = rolled_back()
    assert recovery_s(epochs, 104.0, {1001}) == pytest.approx(0.2)  # round 4 of epoch 2
    assert recovery_s(epochs[:1], 104.0, {1001}) is None
    assert recovery_s(CALM, 103.5, set()) == pytest.approx(1.6)  # began at 104.1
    assert recovery_s(CALM, 108.0, set()) is None


def test_who_joined_and_left_is_said() -> None:
    epochs = rolled_back()
    assert news(epochs, trace(epochs).again) == [
        "epoch 2 of the ranks, from round 3 on: 2 ranks; without what was rank 1; 3 rounds computed"
        " again",
        "epoch 3 of the ranks, from round 6 on: 3 ranks; joined: rank 1 (pid 1003)",
    ]


def test_logs_are_read_as_they_were_written_but_for_half_a_line(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    texts: dict[int, str] = {}
    for epoch in rolled_back():
        for each in epoch.parts:
            begin = asdict(each)
            rounds, metrics = begin.pop("rounds"), begin.pop("metrics")
            begin.pop("failure")
            found = [{"begin": begin}, *rounds, *([{"end": metrics}] if metrics else [])]
            texts.setdefault(each.pid, "")
            texts[each.pid] += "".join(json.dumps(line) + "\n" for line in found)
    texts[1001] += '{"round": 6, "ti'
    for pid, text in texts.items():
        (tmp_path / "ledger" / f"rounds-{pid}.jsonl").write_text(text)
    assert read_history(tmp_path) == rolled_back()
    assert read_history(tmp_path / "nothing") == []


def verdict(chaos: list[MemberEpoch], exit_code: int = 0, **more: Any) -> Ledger:
    fault = Injected(parse_fault("kill", "worker:1@4s"), 4.0, 104.0, "rank 1 (pid 1001)")
    fault.lost = {1001}
    given: dict[str, Any] = {"began_s": 100.0, "seconds": (8.0, 9.0), **more}
    return make_rank_ledger(CALM, chaos, [fault], exit_code=exit_code, **given)


def test_the_report_of_a_run_that_lost_nothing() -> None:
    ledger = verdict(rolled_back())
    text = "\n".join(lines(ledger))
    assert ledger.problems == [] and json.loads(ledger.to_json())["lost_nothing"] is True
    for line in (
        "kill worker:1@4s  rank 1 (pid 1001)  4.0 s  0.2 s",
        "1      24            0      0",
        "loss    0.2500       0.5000     +0.25",
        "joined: rank 1 (pid 1003)",
        "NOTHING WAS LOST: every sample counted once",
    ):
        assert line in text, text


@pytest.mark.parametrize(
    ("chaos", "more", "says"),
    [
        (rolled_back()[:2], {}, "epoch 2: 12 samples were never computed"),
        (rolled_back()[:2], {}, "no rank left a log that says how the run ended"),
        (rolled_back(), {"exit_code": 1}, "the run did not finish, it ended with exit code 1"),
        (rolled_back(), {"left": ["left in /dev/shm: x"]}, "left in /dev/shm: x"),
        ([], {}, "epoch 1: 24 samples were never computed"),
    ],
)
def test_what_was_lost_is_named(chaos: list[MemberEpoch], more: Any, says: str) -> None:
    assert says in (ledger := verdict(chaos, **more)).problems, ledger.problems
    assert "LOST:" in lines(ledger)
