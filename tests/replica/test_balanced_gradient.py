"""The gradient for which ranks claim shards: each counts once, also those of a slow rank.

Ranks are threads, and what makes one slow is an event that the test sets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.core import Position
from manyhands.data.batches import IndexedBatches
from manyhands.data.shard_claims import ShardClaims
from manyhands.data.sources import TensorSource
from manyhands.replica.forward import TaskLoss
from manyhands.replica.lbfgs.balanced_gradient import BalancedGradient
from manyhands.replica.objective import Objective
from manyhands.split.data import DataSplit

CPU = torch.device("cpu")
N, MICRO = 23, 4  # six shards, of unequal sizes
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sin().sum(1)
WAIT_S = 30.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(5, 7), nn.Dropout(0.0), nn.Linear(7, 1)
        self.before: Callable[[Tensor], None] = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        return self.last(self.drop(self.first(x).tanh())).squeeze(-1)


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(1)
    made = Net().double()
    made.drop.p = dropout
    return made


def squared(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().mean()


def rank_of(model: nn.Module, claims: Any) -> BalancedGradient:
    split = DataSplit(N, N, MICRO, 0, 1)
    batches = IndexedBatches(
        TensorSource((X, Y), CPU), lambda epoch: torch.arange(N), split, Position()
    )
    loss = TaskLoss(model, batches, Objective(squared), "fp32", CPU)
    return BalancedGradient(list(model.parameters()), loss, batches, claims, seed=3)


def scaled(loss: Tensor, count: int) -> Tensor:
    return loss * (count / N)


def together(models: list[Net], store: dist.Store) -> tuple[list[BalancedGradient], list[Any]]:
    size = len(models)
    made = [rank_of(m, ShardClaims(store, r, size)) for r, m in enumerate(models)]
    with ThreadPoolExecutor(size) as pool:
        sums = list(pool.map(lambda one: one(scaled), made))
    return made, sums


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def assert_whole(models: list[Net], sums: list[Any], model: Net) -> None:
    """The sums over ranks are loss, count and gradient of all samples."""
    loss = squared(model(X), Y)
    loss.backward()
    assert sum(count for _, count in sums) == N
    assert torch.allclose(sum(total for total, _ in sums), loss * N, rtol=1e-12)
    for parts in zip(gradients(model), *map(gradients, models), strict=True):
        whole, *mine = parts
        assert torch.allclose(sum(mine), whole, rtol=1e-12, atol=1e-14)


def test_the_sum_over_ranks_is_the_gradient_of_all_samples() -> None:
    models = [net() for _ in range(3)]
    made, sums = together(models, dist.HashStore())
    assert sorted(k for one in made for k in one.counted) == list(range(6))
    assert_whole(models, sums, net())


def test_the_shard_of_a_slow_rank_is_finished_by_another_and_counts_once() -> None:
    """The slow rank is in the middle of its first shard until the other one has computed all."""
    slow, fast = net(), net()
    entered, over = threading.Event(), threading.Event()

    def wait(x: Tensor) -> None:
        entered.set()
        assert over.wait(WAIT_S)

    slow.before = wait
    store = dist.HashStore()
    ranks = [rank_of(m, ShardClaims(store, r, 2)) for r, m in enumerate((slow, fast))]
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(ranks[0], scaled)
        assert entered.wait(WAIT_S)
        total = ranks[1](scaled)
        over.set()
        sums = [late.result(), total]
    assert ranks[1].counted[-1] == 0 and sorted(ranks[1].counted) == list(range(6))
    assert ranks[0].counted == [] and sums[0][1] == 0
    assert all(p.grad is None for p in slow.parameters())
    assert_whole([slow, fast], sums, net())


class Claimed:
    """Claims of a rank whose first shard another one finishes while it is at work."""

    def __init__(self) -> None:
        self.left, self.looks = [1, 0], 0

    def begin(self, shards: int) -> None: ...

    def claim(self) -> int | None:
        return self.left.pop() if self.left else None

    def finish(self, shard: int) -> bool:
        assert shard == 1, "shard 0 was given up"
        return True

    def finished(self, shard: int) -> bool:
        self.looks += 1
        return shard == 0


def test_a_rank_gives_up_a_shard_before_the_next_layer(monkeypatch: Any) -> None:
    monkeypatch.setattr("manyhands.replica.lbfgs.balanced_gradient.LOOK_EVERY_S", 0.0)
    model, claims = net(), Claimed()
    passed: list[int] = []
    model.last.register_forward_hook(lambda *_: passed.append(claims.looks))
    total, count = rank_of(model, claims)(scaled)
    assert count == 4 and len(passed) == 1  # shard 1 alone went through the last layer
    alone = net()
    loss = squared(alone(X[4:8]), Y[4:8])
    scaled(loss, 4).backward()
    assert torch.allclose(total, loss * 4)
    assert all(map(torch.equal, gradients(model), gradients(alone)))
    assert not model.first._forward_pre_hooks


def test_random_numbers_belong_to_a_shard_and_not_to_a_rank() -> None:
    """Dropout drops the same units, whoever computes a shard; the rank's own numbers go on."""
    store, alone = dist.HashStore(), net(0.5)
    single = rank_of(alone, ShardClaims(store, 0, 1))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    total, _ = single(scaled)
    assert torch.equal(torch.get_rng_state(), before)
    assert single.drew() and not single.drew()

    halves = [net(0.5) for _ in range(2)]
    # one after the other: threads of one process would share its random numbers
    parts = [Half(0, 3), Half(3, 6)]
    sums = [rank_of(m, part)(scaled) for m, part in zip(halves, parts, strict=True)]
    assert torch.allclose(sum(t for t, _ in sums), total, rtol=1e-12)
    for whole, *mine in zip(gradients(alone), *map(gradients, halves), strict=True):
        assert torch.allclose(sum(mine), whole, rtol=1e-12, atol=1e-14)


class Half:
    """Claims of a rank that gets some of the shards."""

    def __init__(self, first: int, stop: int):
        self.left = list(range(first, stop))

    def begin(self, shards: int) -> None: ...

    def claim(self) -> int | None:
        return self.left.pop(0) if self.left else None

    def finish(self, shard: int) -> bool:
        return True

    def finished(self, shard: int) -> bool:
        return False


def test_without_dropout_nothing_is_drawn() -> None:
    single = rank_of(net(), ShardClaims(dist.HashStore(), 0, 1))
    single(scaled)
    assert not single.drew()
