"""Habits in task(): what a step or an optimizer function does that would train something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import manyhands as mh
from manyhands.errors import TaskError

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def train(folder: Path, words: str = "", **given: Any) -> mh.Result:
    plain = {"train": (X, Y), "optimizer": lambda p: torch.optim.SGD(p, lr=0.5), "batch": 16}
    task = mh.Task(model=nn.Linear(4, 2), **{**plain, **given})
    return mh.train(task, f"device=cpu {words}", directory=folder / "run", quiet=True, argv=False)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_an_optimizer_function_may_go_through_the_parameters_twice(tmp_path: Path) -> None:
    def grouped(p: Any) -> torch.optim.Optimizer:
        decayed, plain = [q for q in p if q.ndim > 1], [q for q in p if q.ndim <= 1]
        assert decayed and plain
        return torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])

    train(tmp_path, step=loss_of, optimizer=grouped)


def runs_backward(model: nn.Module, batch: Any) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    return loss


def clears(model: nn.Module, batch: Any) -> Tensor:
    model.zero_grad()
    return loss_of(model, batch)


def steps(model: nn.Module, batch: Any) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss_of(model, batch)


def clips(model: nn.Module, batch: Any) -> Tensor:
    clip_grad_norm_(model.parameters(), 1.0)
    return loss_of(model, batch)


@pytest.mark.parametrize(
    ("step", "words", "says"),
    [
        (runs_backward, "", "step= has called backward itself"),
        (clears, "accumulate=2", "was cleared or changed between the micro-batches"),
        (steps, "", "the task called SGD.step"),
        (clips, "", "clip by the plan: clip=1.0"),
    ],
)
def test_a_step_that_does_what_the_run_does_is_refused(
    tmp_path: Path, step: Any, words: str, says: str
) -> None:
    with pytest.raises(TaskError, match=says):
        train(tmp_path, words, step=step)


def test_a_step_may_train_something_of_its_own(tmp_path: Path) -> None:
    probe = torch.zeros(2, requires_grad=True)
    inner = torch.optim.SGD([probe], lr=0.1)

    def probing(model: nn.Module, batch: Any) -> Tensor:
        (probe - 1).square().sum().backward()
        inner.step()
        inner.zero_grad()
        return loss_of(model, batch)

    train(tmp_path, step=probing)
    assert probe.min() > 0.5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {
                "step": lambda m, b: (
                    0.1 * nn.functional.cross_entropy(m(b[0]), b[1], reduction="sum")
                )
            },
            "looks like a sum",
        ),
        (
            {
                "step": lambda m, b: (
                    nn.functional.cross_entropy(m(b[0]), b[1], reduction="sum") / len(b[0])
                )
            },
            "",
        ),
        ({"step": lambda m, b: (loss_of(m, b), int((m(b[0]).argmax(1) == b[1]).sum()))}, "fewer"),
        ({"step": lambda m, b: (loss_of(m, b), len(b[0]))}, ""),
        ({"loss": nn.CrossEntropyLoss(), "train": (X, torch.where(X[:, 0] > 9, -100, Y))}, ""),
    ],
    ids=["scaled sum", "divided sum", "right answers", "samples", "no padding"],
)
def test_a_loss_that_is_weighted_otherwise_is_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], given: dict[str, Any], says: str
) -> None:
    train(tmp_path, "accumulate=2", **given)
    said = capfd.readouterr().err
    assert says in said and (says or "loss" not in said), said


def test_padding_that_comes_after_the_first_batch_is_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    padded = Y.clone()
    padded[50:53] = -100
    given = {"loss": nn.CrossEntropyLoss(), "train": (X, padded)}
    train(tmp_path, "split=ordered accumulate=2 batch=8", **given)
    assert "the loss is no mean over the samples of a batch" in capfd.readouterr().err


def test_a_seed_of_torch_that_a_run_does_not_look_at_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(7)
    train(tmp_path / "a", step=loss_of)
    assert "torch was seeded with 7 before" in capfd.readouterr().err
    train(tmp_path / "b", "seed=7", step=loss_of)
    train(tmp_path / "c", step=loss_of, seed=7)
    assert "seeded" not in capfd.readouterr().err
