"""Data split: every sample exactly once per epoch, for any number of ranks.

From any position on; all small cases.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core import Position
from manyhands.split.data import (
    SPLITS,
    BatchSplit,
    DataSplit,
    ShareSchedule,
    ordered,
    rank_range,
    sampled,
    share_range,
    shuffled,
)

SAMPLES, BATCHES, SIZES = (1, 2, 5, 12, 31), (1, 2, 3, 8), (1, 2, 3, 4, 7)
CASES = list(
    itertools.product(SAMPLES, BATCHES, SIZES, (1, 2, 3))
)  # samples, micro-batch of a rank, ranks, accumulate


def splits(
    samples: int, micro: int, size: int, accumulate: int, global_batch: int | None = None
) -> list[DataSplit]:
    return [
        DataSplit(samples, global_batch or micro * accumulate * size, micro, r, size)
        for r in range(size)
    ]


def epoch(
    ranks: list[DataSplit],
    at: Position = Position(),  # noqa: B008
) -> tuple[list[list[list[range]]], Position]:
    """Samples of every rank and step, from `at` to the end of its epoch: [step][rank][micro]."""
    steps, start = [], at.epoch
    while at.epoch == start:
        takes = [r.step_samples(at) for r in ranks]
        assert len({t.after for t in takes}) == 1, "ranks must agree on where they stand"
        steps.append([list(t.micros) for t in takes])
        at = takes[0].after
    return steps, at


def offsets(steps: list[list[list[range]]]) -> list[int]:
    return [i for step in steps for rank in step for micro in rank for i in micro]


@pytest.mark.parametrize("order", ["shuffled", "ordered"])
def test_every_sample_is_used_exactly_once_per_epoch_by_any_number_of_ranks(order: str) -> None:
    for samples, micro, size, accumulate in CASES:
        steps, after = epoch(splits(samples, micro, size, accumulate))
        indices = SPLITS[order](samples, 7, 3)[torch.tensor(offsets(steps))]
        assert sorted(indices.tolist()) == list(range(samples)), (samples, micro, size, accumulate)
        assert (
            after == Position(1, 0, len(steps))
            and len(steps) == splits(samples, micro, size, accumulate)[0].steps_per_epoch
        )


def test_the_union_of_all_ranks_is_the_batch_of_one_rank_step_by_step() -> None:
    for samples, micro, size, accumulate in CASES:
        many, _ = epoch(splits(samples, micro, size, accumulate))
        one, _ = epoch(splits(samples, micro * size, 1, accumulate))
        assert len(many) == len(one)
        for theirs, ours in zip(many, one, strict=True):
            assert sorted(offsets([theirs])) == offsets([ours])
            # and micro-batch by micro-batch, so that BatchNorm over the union sees one process's
            # micro-batches
            for k, block in enumerate(ours[0]):
                assert [i for rank in theirs for i in rank[k]] == list(block)


def test_all_ranks_make_the_same_number_of_micro_batches_none_larger_than_asked() -> None:
    for samples, micro, size, accumulate in CASES:
        for step in epoch(splits(samples, micro, size, accumulate))[0]:
            assert len({len(rank) for rank in step}) == 1
            lengths = [len(m) for rank in step for m in rank]
            assert max(lengths) <= micro
            for k in range(len(step[0])):  # shares of one micro-batch differ by at most one sample
                shares = [len(rank[k]) for rank in step]
                assert max(shares) - min(shares) <= 1


def test_an_uneven_last_batch_is_shared_out_and_some_ranks_may_get_nothing() -> None:
    steps, _ = epoch(splits(samples=17, micro=4, size=4, accumulate=1))
    assert [[len(rank[0]) for rank in step] for step in steps] == [[4, 4, 4, 4], [1, 0, 0, 0]]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4), (4, 7)])
def test_switching_the_number_of_ranks_in_mid_epoch_keeps_exactly_once(
    before: int, after: int
) -> None:
    for samples, micro, switch in itertools.product((9, 24, 31), (1, 2), (1, 2, 3)):
        batch = micro * before
        ranks, at, seen = splits(samples, micro, before, 1), Position(), []
        for _ in range(switch):
            seen += offsets([[list(r.step_samples(at).micros) for r in ranks]])
            at = ranks[0].step_samples(at).after
        first = at.epoch * samples  # a tiny epoch may be over before the switch
        rest, _ = epoch(splits(samples, micro, after, 1, global_batch=batch), at)
        assert sorted(seen[first:] + offsets(rest)) == list(range(samples))
        steps_alone = len(epoch(splits(samples, batch, 1, 1))[0])
        assert switch % steps_alone + len(rest) == steps_alone, "the same steps, on other ranks"


def test_walking_from_a_position_is_the_tail_of_walking_from_the_start() -> None:
    split = DataSplit(31, 6, 2, 1, 3)
    takes = list(itertools.islice(split.steps_from(Position()), 14))  # over the end of two epochs
    for k in (0, 3, 5, 6, 11):
        assert list(itertools.islice(split.steps_from(takes[k].position), 14 - k)) == takes[k:]


def test_the_order_changes_with_epoch_and_seed_and_with_nothing_else() -> None:
    orders = {
        (seed, n): tuple(shuffled(50, seed, n).tolist()) for seed in range(4) for n in range(4)
    }
    assert len(set(orders.values())) == 16
    torch.manual_seed(99)
    assert tuple(shuffled(50, 2, 3).tolist()) == orders[2, 3]
    state = torch.get_rng_state()
    shuffled(50, 0, 0), sampled(50, 0, 0)
    assert torch.equal(state, torch.get_rng_state()), (
        "splitting must not draw from the user's generator"
    )


def test_sampled_draws_with_replacement_evenly_and_the_same_again() -> None:
    draws = torch.cat([sampled(40, 5, n) for n in range(250)])
    counts = torch.bincount(draws, minlength=40).double()
    chi_square = float(((counts - 250) ** 2 / 250).sum())
    assert 15 < chi_square < 73, "39 degrees of freedom: 0.1 and 99.9 per cent"
    assert len(set(sampled(40, 5, 0).tolist())) < 40
    assert torch.equal(sampled(40, 5, 7), sampled(40, 5, 7)) and not torch.equal(
        sampled(40, 5, 7), sampled(40, 5, 8)
    )


def test_ordered_is_as_stored() -> None:
    assert ordered(5, 1, 2).tolist() == [0, 1, 2, 3, 4]


def test_parts_cover_in_order_and_differ_by_at_most_one() -> None:
    for total, size in itertools.product(range(0, 20), range(1, 9)):
        parts = [rank_range(total, r, size) for r in range(size)]
        assert [i for p in parts for i in p] == list(range(total))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


# -- batches of a batch sampler --

LISTED = [[3, 1, 4, 2, 2], [5, 5]]


def listed(size: int, **more: int) -> list[list[list[range]]]:
    """By rank, step and micro-batch: what the ranks compute in two epochs."""
    found = []
    for rank in range(size):
        split = BatchSplit(lambda epoch: LISTED[epoch % 2], rank, size, **more)
        steps = itertools.takewhile(lambda s: s.position.epoch < 2, split.steps_from(Position()))
        found.append([list(step.micros) for step in steps])
    return found


def test_every_rank_computes_the_next_batch_of_a_batch_sampler() -> None:
    assert listed(2) == [
        [[range(0, 3)], [range(4, 8)], [range(10, 12)], [range(0, 5)]],
        [[range(3, 4)], [range(8, 10)], [range(12, 12)], [range(5, 10)]],
    ]
    (alone,) = listed(1)
    assert [micro for (micro,) in alone[:5]] == [
        range(0, 3),
        range(3, 4),
        range(4, 8),
        range(8, 10),
        range(10, 12),
    ]


@pytest.mark.parametrize(("size", "more"), [(1, {}), (2, {}), (3, {"accumulate": 2}), (4, {})])
def test_no_sample_of_a_batch_sampler_is_lost_or_used_twice(size: int, more: Any) -> None:
    found = listed(size, micros=2, **more)
    assert len({len(steps) for steps in found}) == 1, "all ranks take the same number of steps"
    offsets = [i for steps in found for step in steps for micro in step for i in micro]
    assert sorted(offsets) == sorted([*range(12), *range(10)])
    assert len({len(step) for steps in found for step in steps}) == 1


def test_one_process_that_stands_for_several_ranks_takes_their_batches_as_one() -> None:
    (alone,) = listed(1, union=2)
    assert alone == [[range(0, 4)], [range(4, 10)], [range(10, 12)], [range(0, 10)]]


def test_a_batch_sampler_can_be_resumed_on_another_number_of_ranks() -> None:
    two = BatchSplit(lambda epoch: LISTED[epoch % 2], 0, 2)
    at = two.step_samples(Position()).after
    assert at == Position(0, 4, 1) and two.total(Position()) == 4 and two.total(at) == 6
    one = BatchSplit(lambda epoch: LISTED[epoch % 2], 0, 1)
    assert one.step_samples(at).micros == (range(4, 8),)
    assert (two.samples, two.steps_per_epoch, one.steps_per_epoch) == (12, 3, 5)


# -- shares that change --


def test_shares_are_in_proportion_and_leave_no_rank_without_samples() -> None:
    weights = [1.0, 1.0, 0.25]
    assert [len(share_range(90, r, weights)) for r in range(3)] == [40, 39, 11]
    assert [len(share_range(3, r, weights)) for r in range(3)] == [1, 1, 1]
    assert [len(share_range(2, r, weights)) for r in range(3)] == [1, 1, 0]


@given(st.integers(0, 300), st.lists(st.floats(0.125, 2.0), min_size=1, max_size=9).map(tuple))
def test_shares_of_any_weights_divide_the_whole(total: int, weights: tuple[float, ...]) -> None:
    parts = [share_range(total, r, weights) for r in range(len(weights))]
    assert [i for part in parts for i in part] == list(range(total))
    assert total < len(weights) or min(map(len, parts)) >= 1


@pytest.mark.parametrize(("samples", "micro", "accumulate"), [(97, 4, 1), (96, 8, 2), (31, 3, 3)])
def test_every_sample_is_used_once_while_shares_change(
    samples: int, micro: int, accumulate: int
) -> None:
    size, schedule = 3, ShareSchedule()
    ranks = [
        dataclasses.replace(s, shares=schedule) for s in splits(samples, micro, size, accumulate)
    ]
    plain = splits(samples, micro, size, accumulate)
    at, number = Position(), 0
    for weights in ((1.0, 1.0, 0.25), (2.0, 0.5, 0.5), (0.125, 1.0, 1.0)):
        schedule.change(at.steps + 1, weights)
        steps, after = epoch(ranks, at)
        assert sorted(offsets(steps)) == list(range(samples))
        same, plain_after = epoch(plain, at)
        assert after == plain_after and len(same) == len(steps)
        # micro-batch by micro-batch the union over ranks is what it was, for BatchNorm over ranks
        for mine, equal in zip(steps, same, strict=True):
            for k in range(len(equal[0])):
                union = [i for rank in mine for i in rank[k]]
                assert union == [i for rank in equal for i in rank[k]]
        at, number = after, number + len(steps)
    assert at.steps == number


def test_the_split_of_a_step_does_not_depend_on_when_it_is_asked_for() -> None:
    schedule = ShareSchedule()
    split = dataclasses.replace(splits(60, 5, 2, 1)[0], shares=schedule)
    early = list(itertools.islice(split.steps_from(Position()), 4))
    schedule.change(4, (1.0, 0.25))
    again = list(itertools.islice(split.steps_from(Position()), 6))
    assert again[:4] == early
    assert [len(s.micros[0]) for s in again] == [5, 5, 5, 5, 7, 7]
