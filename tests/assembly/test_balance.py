"""Batches by speed: ranks on a virtual clock, one of them slow; the model is that of one process.

Each sample costs a rank its own time, and every all-reduce waits for the slowest.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from manyhands.assembly.culprits.balance import LEAST, MOST, Balance, balanced
from manyhands.assembly.culprits.round_marks import RoundMarks
from manyhands.core import Position
from manyhands.data import sources
from manyhands.data.batches import IndexedBatches
from manyhands.data.sources import TensorSource
from manyhands.exchange.activity import Activity
from manyhands.exchange.inproc import InprocGroup, World
from manyhands.exchange.observed import ObservedGroup
from manyhands.merge.all_reduce import AllReduce
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.update import WholeUpdate
from manyhands.split.data import DataSplit, ShareSchedule, shuffled
from support.replicas import memory, mlp, rows, sgd, squared, weights

SAMPLES, BATCH, STEPS = 240, 16, 150
CPU = torch.device("cpu")
COST_S = 0.01  # of one sample


def train(
    world: World, group: InprocGroup, cost_s: list[float]
) -> tuple[dict[str, Tensor], list[list[int]], list[dict[str, float]]]:
    """This rank's weights, the samples of each of its steps, and the shares that were reported."""
    rank, size = group.rank, group.size
    model, schedule, reported = mlp(), ShareSchedule(), []
    link = ObservedGroup(group, lambda event: None, clock=group.clock)
    link.activity = Activity(group.clock)
    source = sources.source((rows(SAMPLES),), CPU, "train")
    assert isinstance(source, TensorSource)
    total = 4 * BATCH
    split = DataSplit(SAMPLES, total, total // size, rank, size, schedule)
    batches = IndexedBatches(source, lambda epoch: shuffled(SAMPLES, 0, epoch), split, Position())
    steps: list[list[int]] = []

    def next_loss() -> MicroLoss:
        batches.peek()
        assert batches._step is not None
        where = batches._step.micros[0]
        steps.append([batches._step.position.epoch * SAMPLES + i for i in where])
        batch = batches.next()
        world.spend(rank, cost_s[rank] * batch.count)
        return MicroLoss(squared(model, batch.values[0]), batch.count, batch.last)

    flat = FlatParameters(model, memory, 2**20)
    update = WholeUpdate(flat, model, sgd(model.parameters()))
    replica, rule = ModuleReplica(flat, update, next_loss, nominal=total), AllReduce()
    emit = lambda event: reported.append(event.value)
    context = cast(
        Any,
        SimpleNamespace(
            group=link,
            rank=rank,
            device=CPU,
            leads=rank == 0,
            data_parallel_size=size,
            data_parallel_rank=rank,
            recorder=SimpleNamespace(emit=emit),
        ),
    )
    callbacks = [RoundMarks(context), Balance(context, schedule, batches)]
    for round in range(1, STEPS + 1):
        link.round = round
        loss = rule.round(replica, link, {})
        for callback in callbacks:
            callback.on_round(None, round, loss)
    return weights(model), steps, reported


def run(cost_s: list[float]) -> tuple[float, list[Any]]:
    world = World(len(cost_s))

    def main(group: InprocGroup) -> Any:
        return *train(world, group, cost_s), group.clock()

    found = world.run(main)
    return max(f[-1] for f in found), found


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_rank_gets_fewer_samples_and_the_model_is_that_of_one_process(slow: int) -> None:
    cost_s = [COST_S * (3 if r == slow else 1) for r in range(4)]
    _, ranks = run(cost_s)
    _, ((alone, whole, _, _),) = run([COST_S])
    # every step takes the samples that one process takes, each once
    for step, expected in enumerate(whole):
        taken = [i for _, steps, *_ in ranks for i in steps[step]]
        assert sorted(taken) == sorted(expected), f"step {step}"
    for model, *_ in ranks:
        for name, value in model.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12)
    # 4 x 16 samples at speeds 1 and 1/3: 19.2 and 6.4
    sizes = [len(steps[-2]) for _, steps, *_ in ranks]
    assert sum(sizes) == 4 * BATCH and sizes[slow] in (6, 7)
    assert all(s in (19, 20) for r, s in enumerate(sizes) if r != slow)
    assert len(ranks[0][2]) >= 1 and not any(r[2] for r in ranks[1:])


def test_rounds_are_shorter_with_shares_by_speed() -> None:
    even, _ = run([COST_S * 1.7] * 4)
    uneven, _ = run([COST_S * 3, COST_S, COST_S, COST_S])
    # with equal shares every round would take as long as the slow rank: 3 a sample
    assert uneven < even


def test_equal_ranks_keep_equal_shares() -> None:
    _, ranks = run([COST_S] * 4)
    assert not ranks[0][2] and all(len(steps[-2]) == BATCH for _, steps, *_ in ranks)


def test_weights_stay_within_their_bounds_and_keep_their_mean() -> None:
    found = balanced([1.0] * 4, [100.0, 1.0, 1.0, 1.0])
    assert found is not None and found[0] == pytest.approx(LEAST, rel=0.1)
    for _ in range(20):
        found = balanced(found, [100.0, 1.0, 1.0, 1.0])
        assert found is not None and min(found) >= LEAST * 0.99 and max(found) <= MOST * 1.01
        assert sum(found) == pytest.approx(4.0, rel=0.05)
    assert balanced([1.0, 1.0], [1.0, 1.1]) is None
    assert balanced([1.0, 1.0], [1.0, 0.0]) is None
