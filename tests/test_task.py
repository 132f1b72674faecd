"""A task that cannot be trained is refused where it is written, with what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import Task
from manyhands.errors import TaskError
from manyhands.task import build_model, resolve


def make(**changed: Any) -> Task:
    known: dict[str, Any] = dict(
        model=nn.Linear(2, 1),
        loss=nn.functional.mse_loss,
        train=(torch.zeros(4, 2), torch.zeros(4, 1)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    return Task(**{**known, **changed})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"loss": None}, r"Task needs either loss=.* or step=.*; got neither"),
        ({"step": lambda m, b: m(b).mean()}, "got both"),
        (
            {"loss": None, "step": lambda m, b: m(b).mean(), "metrics": {"a": lambda o, t: o}},
            "metrics compare model.* but the task has step=",
        ),
        ({"batch": 0}, "batch=0, but a batch holds at least 1 sample; set batch=1 or more"),
        ({"batch": -3}, "batch=-3"),
        ({"steps": 0}, "steps=0, but at least 1 step is needed"),
        ({"epochs": 0}, "epochs=0, but a positive number is needed"),
        ({"epochs": float("nan")}, "epochs=nan"),
        ({"epochs": float("inf")}, "epochs=inf"),
        ({"clip": 0.0}, "clip=0.0, but a positive norm is needed; leave it out for no clipping"),
        ({"clip": float("nan")}, "clip=nan"),
    ],
)
def test_a_task_that_cannot_be_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        make(**changed)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            lambda: nn.Linear(2, 1).requires_grad_(False),
            "Linear has no parameter with requires_grad=True: there is nothing to train",
        ),
        (lambda: nn.ReLU(), "ReLU has no parameter"),
        (lambda: "a string", "Task.model gave a str, but a torch.nn.Module is needed"),
    ],
)
def test_a_model_without_anything_to_train_is_refused(model: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        build_model(make(model=model))


def test_a_task_function_that_gives_something_else_is_refused() -> None:
    with pytest.raises(
        TaskError, match=r"task\(\) returned a NoneType, but a manyhands.Task is needed"
    ):
        resolve(lambda: None, None)  # type: ignore[arg-type,return-value]


def test_every_rank_makes_the_same_weights_from_the_plans_seed_or_the_tasks_own() -> None:
    def weight(seed: int | None, own: int = 0) -> float:
        task, used = resolve(lambda: make(model=nn.Linear(1, 1), seed=own), seed)
        assert used == (own if seed is None else seed)
        return float(build_model(task).weight)

    assert weight(None) == weight(0) == weight(None)
    assert weight(3) == weight(None, own=3) == weight(3, own=5) != weight(0)


# -- the number of threads --


def orthogonal() -> nn.Module:
    """Its initial weights come from a QR decomposition, which threads compute block by block."""
    model = nn.Linear(300, 400)
    nn.init.orthogonal_(model.weight)
    return model


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_model_starts_from_the_same_bits_whatever_the_number_of_threads(
    two_threads: None,
) -> None:
    def weights(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        task, _ = resolve(lambda: make(model=orthogonal()), 0)
        torch.manual_seed(0)
        late = build_model(make(model=orthogonal))
        assert torch.get_num_threads() == threads
        return [build_model(task).weight.detach(), late.weight.detach()]

    for one, two in zip(weights(1), weights(2), strict=True):
        assert torch.equal(one, two)


def test_the_number_of_threads_that_a_task_sets_stays(two_threads: None) -> None:
    def task() -> Task:
        torch.set_num_threads(3)
        return make()

    resolve(task, None)
    assert torch.get_num_threads() == 3
