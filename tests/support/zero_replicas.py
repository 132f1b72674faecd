"""Replicas whose parameters are sharded over ranks (ZeRO), beside the same model alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import (
    Finished,
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.exchange import reduce_scatter
from manyhands.exchange.inproc import World
from manyhands.exchange.shared import shard_memory
from manyhands.parallel.zero.full_state import model_state
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.replica import state
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.update import WholeUpdate
from support.compare import assert_tensors_close
from support.paths import zoo_file

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]
Optimizers = Callable[[Any], Optimizer]


@functools.cache
def zoo(name: str) -> dict[str, Any]:
    return zoo_file(name)


def model_of(name: str) -> nn.Module:
    model = zoo(name)["task"]().model.double()
    return without_dropout(model)


def without_dropout(model: nn.Module) -> nn.Module:
    """It would draw other numbers on other ranks."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    return model


def data_of(name: str, steps: int, batch: int) -> list[Batch]:
    task = zoo(name)["task"]()
    wide = [x.double() if x.is_floating_point() else x for x in task.train]
    return [tuple(x[s * batch : (s + 1) * batch] for x in wide) for s in range(steps)]


def loss_of(name: str) -> Loss:
    task = zoo(name)["task"]()
    return lambda model, batch: task.loss(model(*batch[:-1]), batch[-1])


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, eps=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-4),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, eps=1e-2),
}


def cut(batch: Batch, shares: Sequence[int]) -> list[Batch]:
    return list(zip(*(x.split(list(shares)) for x in batch), strict=True))


class NextLosses:
    """`steps[s]` are the micro-batches of one rank; one without samples is None, or borrowed and
    counted as 0.
    """

    def __init__(
        self, model: nn.Module, steps: Sequence[Sequence[Batch]], loss: Loss, borrow: bool
    ):
        self.todo = [(micro, i == len(step) - 1) for step in steps for i, micro in enumerate(step)]
        self.model, self.loss, self.borrow = model, loss, borrow

    def __call__(self) -> MicroLoss:
        batch, last = self.todo.pop(0)
        count = len(batch[0])
        if not count and not self.borrow:
            return MicroLoss(None, 0, last)
        value = self.loss(
            self.model,
            batch if count else tuple(torch.zeros(1, *x.shape[1:], dtype=x.dtype) for x in batch),
        )
        return MicroLoss(value, count, last)


def spread(
    group: Group,
    model: nn.Module,
    stage: int,
    next_loss: Any,
    *,
    nominal: int,
    optimizer: Optimizers,
    schedule: Any = None,
    **options: Any,
) -> ModuleReplica:
    memory, common = shard_memory(group)
    layout = {
        k: options.pop(k)
        for k in ("bucket_bytes", "block_bytes", "gather_dtype", "lookahead")
        if k in options
    }
    made = optimizer(model.parameters())
    flat = ShardedParameters(
        model,
        group,
        stage,
        allocate=memory,
        common=common,
        **{"bucket_bytes": 2000, "block_bytes": 4000, **layout},
    )
    update = ShardUpdate(flat, made)
    more = {} if schedule is None else {"schedule": schedule(made)}
    return ModuleReplica(flat, update, next_loss, nominal=nominal, **more, **options)


def alone(
    model: nn.Module,
    steps: Sequence[Batch],
    loss: Loss,
    *,
    optimizer: Optimizers,
    schedule: Any = None,
    **options: Any,
) -> tuple[list[float], ModuleReplica]:
    made = optimizer(model.parameters())
    flat = FlatParameters(model, lambda n, t: torch.zeros(n, dtype=t), 2**20)
    more = {} if schedule is None else {"schedule": schedule(made)}
    next_loss = NextLosses(model, [[s] for s in steps], loss, False)
    one = ModuleReplica(
        flat, WholeUpdate(flat, model, made), next_loss, nominal=len(steps[0][0]), **more, **options
    )
    losses = []
    for _ in steps:
        losses.append(float(one.backward()))
        one.step()
    return losses, one


def together(
    size: int,
    stage: int,
    make: Callable[[], nn.Module],
    steps: Sequence[Sequence[Sequence[Batch]]],
    loss: Loss,
    look: Callable[[ModuleReplica], Any] = lambda replica: None,
    prepare: Callable[[nn.Module, Group], nn.Module] = lambda model, group: model,
    **options: Any,
) -> list[tuple[list[float], Tensors, Any]]:
    """`steps[s][r]` are the micro-batches of rank r; what every rank's losses were, the whole
    model, and what `look` saw.
    """
    models = [make() for _ in range(size)]

    def main(group: Group) -> tuple[list[float], Tensors, Any]:
        model = prepare(models[group.rank], group)
        next_loss = NextLosses(model, [s[group.rank] for s in steps], loss, stage == 3)
        nominal = sum(len(m[0]) for rank in steps[0] for m in rank)
        mine = spread(group, model, stage, next_loss, nominal=nominal, **options)
        losses, seen = [], None
        for _ in steps:
            losses.append(float(mine.backward()))
            mine.step()
            seen = look(mine) or seen
        return losses, model_state(mine.flat), seen

    return World(size).run(main)


def assert_same_as_alone(
    size: int,
    stage: int,
    make: Callable[[], nn.Module],
    data: list[Batch],
    loss: Loss,
    shares: Sequence[Sequence[int]],
    micros: int = 1,
    **options: Any,
) -> list[Any]:
    """Rank r takes `shares[s][r]` samples of step s, in `micros` micro-batches."""

    def parts(batch: Batch, count: int) -> list[Batch]:
        return cut(batch, [count * (k + 1) // micros - count * k // micros for k in range(micros)])

    steps = [
        [parts(mine, n) for mine, n in zip(cut(b, s), s, strict=True)]
        for b, s in zip(data, shares, strict=True)
    ]
    one = make()
    alone_options = {
        k: v
        for k, v in options.items()
        if k not in ("bucket_bytes", "block_bytes", "lookahead", "look", "prepare")
    }
    losses, _ = alone(one, data, loss, **alone_options)
    got = together(size, stage, make, steps, loss, **options)
    for theirs, model, _ in got:
        assert theirs == pytest.approx(losses, rel=1e-12)
        assert_tensors_close(model, state.model_state(one), rtol=1e-11)
    return [seen for _, _, seen in got]


def even(size: int, batch: int, steps: int) -> list[list[int]]:
    return [[batch * (r + 1) // size - batch * r // size for r in range(size)]] * steps


class Axis(Group):
    """Some ranks of a world, as a link of their own."""

    def __init__(self, world: Group, peers: Sequence[int]):
        self.world, self.peers, self.rank, self.size = (
            world,
            list(peers),
            list(peers).index(world.rank),
            len(peers),
        )

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        for value in values.values():
            every = [
                value.detach().clone() if r == self.rank else torch.empty_like(value)
                for r in range(self.size)
            ]
            others = {r: v for r, v in enumerate(every) if r != self.rank}
            self.transfer(dict.fromkeys(others, every[self.rank]), others).wait()
            stacked = torch.stack(every)
            value.detach().copy_(
                stacked.amax(0)
                if op == "max"
                else stacked.mean(0)
                if op == "mean"
                else stacked.sum(0)
            )
        return Finished()

    def own(self, tensor: Tensor) -> list[slice]:
        return [reduce_scatter.equal_part(tensor.numel(), self.rank, self.size)]

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return reduce_scatter.reduce_scatter(self, values, op)

    def all_gather(self, values: Tensors) -> Work:
        return reduce_scatter.all_gather(self, values)

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        for value in values.values():
            if self.rank == source:
                others = [r for r in range(self.size) if r != source]
                self.transfer(dict.fromkeys(others, value), {}).wait()
            else:
                self.transfer({}, {source: value}).wait()
        return Finished()

    def barrier(self) -> None:
        self.all_reduce({"barrier": torch.zeros(1)}).wait()

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        return self.world.swap(values, [self.peers[p] for p in peers])

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        return self.world.transfer(
            {self.peers[r]: v for r, v in give.items()},
            {self.peers[r]: v for r, v in into.items()},
            name,
        )

    def close(self) -> None: ...
