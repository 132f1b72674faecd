"""Forward passes: losses of a batch, accuracy, and modes that an evaluation leaves as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import TaskError
from manyhands.replica import forward
from manyhands.replica.objective import Objective
from manyhands.task import accuracy
from support.small_task import small_data, small_task

CPU = torch.device("cpu")
N = 37
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (N,), generator=torch.Generator().manual_seed(1))


def test_accuracy_counts_classes_tokens_and_pixels() -> None:
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert accuracy(outputs, torch.tensor([0, 1, 0, 0])) == 0.75
    tokens = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    assert accuracy(tokens, tokens.argmax(-1)) == 1.0
    assert accuracy(tokens.transpose(1, 2), tokens.argmax(-1)) == 1.0, (
        "(N, classes, length), as cross_entropy takes it"
    )


def test_the_training_loss_of_no_samples_is_nothing_and_not_nan() -> None:
    """0/0 of an empty batch, which a rank without samples runs for its BatchNorm, must not look
    like divergence.
    """
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    loss = forward.TaskLoss(net, None, Objective(nn.functional.cross_entropy), "fp32", CPU)
    value, count = loss.forward((X[:0], Y[:0]), 0)
    assert count == 0 and float(value) == 0.0
    (value * 0.0).backward()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters()), (
        "backward ran all the way, and gave nothing"
    )


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    unreduced = Objective(lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"))
    loss = forward.TaskLoss(nn.Linear(6, 3), None, unreduced, "fp32", CPU)
    with pytest.raises(
        TaskError,
        match=r"the loss has shape \(37,\), but one number for the batch is needed; use "
        r"reduction='mean'",
    ):
        loss.forward((X, Y), N)


def test_parts_in_eval_mode_stay_so_after_an_evaluation(tmp_path: Path) -> None:
    kept: list[bool] = []

    class Watch(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            kept.append(net[1].training)

    net = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5).eval(), nn.Linear(4, 3))
    mh.train(
        lambda: small_task(net, test=small_data(30)),
        "epochs=2",
        directory=tmp_path / "run",
        quiet=True,
        callbacks=(Watch(),),
    )
    assert kept and not any(kept)
