"""Gradients handed over by a replica: applied anywhere, they are the step it would have made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.replica.module import ModuleReplica
from support.compare import same_tensors
from support.replicas import mlp, replica, rows, sgd, weights
from support.small_task import small_task


def elsewhere(mine: ModuleReplica) -> None:
    """The optimizer's step on the gradient as it was handed over, as a server on the flat vectors
    would make it.
    """
    mine.gradient()
    for piece in mine.flat.views:
        piece.parameter.grad = piece.grad
    mine.optimizer.step()


def both(steps: list[list[Tensor]], **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    ours, theirs = mlp(), mlp()
    away, here = (replica(m, steps, **options) for m in (ours, theirs))
    for _ in steps:
        away.backward()
        here.backward()
        elsewhere(away)
        here.step()
    return weights(ours), weights(theirs)


@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
def test_of_a_full_batch_it_is_the_bits_of_the_own_step_clipped_or_not(clip: float | None) -> None:
    away, here = both([[rows(6, seed=s)] for s in range(5)], nominal=6, clip=clip)
    assert same_tensors(away, here)


def test_of_micro_batches_and_of_a_part_of_the_samples_it_is_the_mean_too() -> None:
    away, here = both(
        [[rows(3, seed=1), rows(2, seed=2)], [rows(1, seed=3), rows(0)], [rows(7, seed=4)]],
        nominal=12,
        clip=0.3,
    )
    assert same_tensors(away, here)


def test_of_a_full_batch_nothing_is_rounded() -> None:
    model = mlp()
    mine = replica(model, [[rows(6)]], nominal=6)
    mine.backward()
    before = {
        p.name: p.parameter.grad.clone() for p in mine.flat.views if p.parameter.grad is not None
    }
    assert len(before) == len(mine.flat.views)
    handed = mine.gradient()
    assert all(torch.equal(p.grad, before[p.name]) for p in mine.flat.views)
    assert {k: (v.shape, v.dtype) for k, v in handed.items()} == {
        k: (v.shape, v.dtype) for k, v in mine.params.items()
    }


def test_asked_twice_it_is_divided_and_clipped_once_and_the_next_batch_starts_anew() -> None:
    mine = replica(mlp(), [[rows(3)], [rows(3)]], nominal=12, clip=0.01)
    handed = []
    for _ in range(2):
        mine.backward()
        mine.gradient()
        handed.append({k: v.clone() for k, v in mine.gradient().items()})
    assert same_tensors(*handed) and float(handed[0]["float64"].norm()) == pytest.approx(
        0.01, rel=1e-3
    )


def test_without_samples_it_is_nothing() -> None:
    mine = replica(mlp(), [[rows(3)], [rows(0)]], nominal=3)
    for _ in range(2):
        mine.backward()
    assert mine.own_count == 0 and not mine.gradient()["float64"].any()


def test_a_parameter_that_was_not_used_has_a_gradient_of_zero() -> None:
    model = mlp()
    mine = replica(model, [[rows(3)]], nominal=6, loss=lambda m, x: m.first(x).sum())
    mine.backward()
    mine.gradient()
    assert all(bool(p.grad.any()) == p.name.startswith("first") for p in mine.flat.views)


def test_the_schedule_goes_on_and_nothing_else_does() -> None:
    model = mlp()
    halved = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    mine = replica(model, [[rows(3)], [rows(0)]], nominal=3, schedule=halved, optimizer=sgd)
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # torch warns where a schedule moves and its optimizer never did
        for lr in (0.05, 0.025):
            mine.backward()
            mine.stepped()
            assert mine.lr == pytest.approx(lr)
    assert same_tensors(weights(model), before) and not mine.optimizer.state
    mine.closing = True  # what comes only ends a block
    mine.stepped()
    assert mine.lr == pytest.approx(0.025)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_another_model_computed_is_an_error(tmp_path: Path, ranks: int) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.others = nn.Linear(8, 3), [nn.Linear(8, 3)]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.others[0](x)
            return out

    with pytest.raises((mh.TaskError, mh.LaunchError), match="no gradient to any of the model's"):
        mh.train(
            lambda: small_task(Other()),
            f"data={ranks} steps=3",
            directory=tmp_path / "run",
            quiet=True,
        )
