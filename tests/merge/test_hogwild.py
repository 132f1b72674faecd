"""Hogwild!: ranks of a World step one parameter vector.

Its equation with the staleness that it has, and what it promises where gradients are sparse.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import PlanError
from manyhands.exchange.inproc import InprocGroup, World
from manyhands.merge.hogwild import Hogwild
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import MicroLoss, ModuleReplica
from manyhands.replica.row_gradients import RowGradients
from manyhands.replica.update import WholeUpdate, fuse
from support.quadratic import share

Make = Callable[[Any], Optimizer]
Loss = Callable[[nn.Module, Tensor], Tensor]


def private(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def train(
    model: nn.Module, make: Make, loss: Loss, batches: list[list[Tensor]], common: bool = True
) -> nn.Module:
    """One rank for each list of batches, by which it steps; the model that all have in the end.
    A rank computes for a while between reading the model and stepping it."""

    def main(group: InprocGroup) -> nn.Module:
        mine, own = copy.deepcopy(model), batches[group.rank]
        flat = FlatParameters(mine, private, 2**20)
        optimizer = make(mine.parameters())
        update = WholeUpdate(flat, mine, optimizer)
        hooks = RowGradients(flat, optimizer)
        if common:
            share(flat, group)
        todo: Iterator[Tensor] = iter(own)

        def next_loss() -> MicroLoss:
            batch = next(todo)
            return MicroLoss(loss(mine, batch), len(batch), True)

        replica = ModuleReplica(
            flat,
            update,
            next_loss,
            nominal=len(own[0]),
            on_window=lambda _: group.world.spend(group.rank, 1.0),
        )
        group.barrier()
        for _ in own:
            Hogwild().round(replica, group, {})
        group.barrier()
        replica.close()
        hooks.close()
        return copy.deepcopy(mine)

    models: list[nn.Module] = World(len(batches)).run(main)
    for other in models:
        assert all(map(torch.equal, models[0].parameters(), other.parameters()))
    return models[0]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.25)


# -- one number --


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))


def half_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model.w.square() / 2


@pytest.mark.parametrize(
    ("ranks", "steps", "w"),
    [
        (1, 4, 0.75**4),
        # two ranks: w <- w - 1/4 w_of_the_step_before;  1, 3/4, 1/2, 5/16, 3/16
        (2, 1, 0.5),
        (2, 2, 0.1875),
        # three ranks: by w two steps before;  1, 3/4, 1/2, 1/4, 1/16, -1/16, -1/8
        (3, 1, 0.25),
        (3, 2, -0.125),
    ],
)
def test_each_step_is_by_the_gradient_at_the_model_of_m_minus_one_steps_before(
    ranks: int, steps: int, w: float
) -> None:
    batches = [[torch.zeros(4)] * steps for _ in range(ranks)]
    assert train(Number(), sgd, half_square, batches).w.item() == w


def test_ranks_with_parameters_of_their_own_are_refused() -> None:
    batches = [[torch.zeros(4)]] * 2
    with pytest.raises(PlanError, match="2 ranks with parameters of their own would never agree"):
        train(Number(), sgd, half_square, batches, common=False)


# -- rows --

ROWS, STEPS, BATCH = 60, 7, 4
OPTIMIZERS: dict[str, Make] = {
    "sgd": sgd,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
}


class Rows(nn.Module):
    """A table and a vector, of which a batch touches few rows."""

    def __init__(self, sparse: bool):
        super().__init__()
        g = torch.Generator().manual_seed(5)
        self.table = nn.Embedding(ROWS, 5, sparse=sparse)
        self.vector = nn.Parameter(torch.randn(ROWS, generator=g))
        with torch.no_grad():
            self.table.weight.copy_(torch.randn(ROWS, 5, generator=g))


def distance(model: nn.Module, ids: Tensor) -> Tensor:
    """Of a row from a target that depends on it."""
    target = torch.sin(ids.float())
    found: Tensor = (model.table(ids) - target[:, None]).square().sum(1)
    return (found + (model.vector[ids] - target).square()).mean()


def disjoint(ranks: int) -> list[list[Tensor]]:
    """Batches of which no two ranks' have a row in common; a rank comes to its rows again."""
    g = torch.Generator().manual_seed(6)
    own = ROWS // ranks
    return [
        [torch.randint(own, (BATCH,), generator=g) * ranks + r for _ in range(STEPS)]
        for r in range(ranks)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_whose_batches_touch_other_rows_have_the_bits_of_serial_training(
    ranks: int, sparse: bool, name: str
) -> None:
    batches, make = disjoint(ranks), OPTIMIZERS[name]
    serial = list(itertools.chain.from_iterable(zip(*batches, strict=True)))
    ours = train(Rows(sparse), make, distance, batches)
    model = Rows(sparse)
    optimizer = make(model.parameters())
    if not sparse:
        fuse(optimizer, torch.device("cpu"))  # as in any run: another kernel has other last bits
    for ids in serial:
        optimizer.zero_grad()
        distance(model, ids).backward()
        optimizer.step()
    assert torch.equal(ours.table.weight, model.table.weight)
    assert torch.equal(ours.vector, model.vector)
    assert not torch.equal(ours.vector, Rows(sparse).vector)


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_update_of_a_row_is_lost_where_ranks_take_turns(ranks: int, sparse: bool) -> None:
    """Each sample moves its row by 1, whatever the row's value."""
    g = torch.Generator().manual_seed(7)
    batches = [
        [torch.randint(ROWS, (BATCH,), generator=g) for _ in range(STEPS)] for _ in range(ranks)
    ]

    def count(model: nn.Module, ids: Tensor) -> Tensor:
        return -(model.table(ids).sum(1) + model.vector[ids]).mean()

    start = Rows(sparse)
    with torch.no_grad():
        start.table.weight.zero_()
        start.vector.zero_()
    ours = train(start, lambda p: torch.optim.SGD(p, lr=float(BATCH)), count, batches)
    seen = torch.cat([torch.cat(own) for own in batches]).bincount(minlength=ROWS).float()
    assert torch.equal(ours.vector, seen)
    assert torch.equal(ours.table.weight, seen[:, None].expand(-1, 5))
