"""A task that cannot be trained is refused where it is written, with what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyhands import Task, accuracy, metrics
from manyhands.assembly.data import with_task_defaults
from manyhands.errors import TaskError
from manyhands.plan import words
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
            "metrics compare outputs with the target, and step= does not say what they are; give",
        ),
        ({"batch": 0}, "batch=0, but a batch holds at least 1 sample; set batch=1 or more"),
        ({"batch": -3}, "batch=-3"),
        ({"steps": 0}, "steps=0, but at least 1 step is needed"),
        ({"epochs": 0}, "epochs=0, but a positive number is needed"),
        ({"epochs": float("nan")}, "epochs=nan"),
        ({"epochs": float("inf")}, "epochs=inf"),
        ({"clip": 0.0}, "clip=0.0, but a positive norm is needed; leave it out for no clipping"),
        ({"clip": float("nan")}, "clip=nan"),
        (
            {"epochs": 5, "steps": 3},
            "epochs=5 and steps=3 both say when to stop; give one of them",
        ),
        ({"steps": float("inf")}, "steps=inf, but a whole number is needed"),
        ({"metrics": [accuracy]}, "metrics is a list, but a dict name -> function is needed"),
        ({"metrics": accuracy}, "metrics is a function, but a dict name -> function is needed"),
        ({"metrics": {"a": 3}}, r"metrics has 'a': 3, but a name and a function of \(outputs"),
        ({"metrics": {"f1": metrics.F1}}, r"the class F1; .* is needed: give an instance, F1\("),
        ({"predict": 3}, r"predict is a int, but a function \(model, batch\) -> \(outputs, target"),
        ({"seed": 42.0}, "seed=42.0, but a whole number is needed: seed=0"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": None}, "seed=None"),
        ({"seed": True}, "seed=True"),
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
        (
            lambda: nn.Sequential(nn.LazyLinear(1)),
            r"0\.weight of Sequential has no shape yet, as it is lazy; .*: run one batch through",
        ),
        (
            lambda: nn.Linear(2, 1, device="meta"),
            "weight of Linear is on the meta device, without values; build the model on the CPU",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(model: Any, says: str) -> None:
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


def test_a_seed_of_numpy_is_a_seed() -> None:
    _, used = resolve(make(seed=np.int64(3)), None)
    assert used == 3 and type(used) is int


def test_a_task_without_epochs_and_steps_trains_one_epoch_and_the_plan_comes_first() -> None:
    def limits(plan: str, **given: Any) -> tuple[float | None, int | None]:
        found = with_task_defaults(words.parse(plan), make(**given), 0)
        return found.epochs, found.steps

    assert limits("") == (1.0, None)
    assert limits("", epochs=0.5) == (0.5, None)
    assert limits("", steps=3) == (None, 3)
    assert limits("steps=7", epochs=2) == (None, 7)
    assert limits("epochs=2", steps=3) == (2, None)


# -- accuracy --

OUTPUTS = torch.tensor([[3.0, 1, 2], [0, 4, 1], [0, 1, 5], [9, 1, 1]])
CLASSES = torch.tensor([0, 1, 2, 1])  # three of four are the largest output


@pytest.mark.parametrize(
    "target",
    [
        CLASSES,
        CLASSES.unsqueeze(1),
        CLASSES.float().unsqueeze(1),
        nn.functional.one_hot(CLASSES),
        nn.functional.one_hot(CLASSES).float(),
        nn.functional.one_hot(CLASSES).bool(),
    ],
    ids=["class", "column", "column of floats", "one-hot", "probabilities", "one-hot of bool"],
)
def test_accuracy_is_the_same_in_every_form_of_target(target: Tensor) -> None:
    assert accuracy(OUTPUTS, target).item() == 0.75
    tokens, last = OUTPUTS.unsqueeze(1), target.unsqueeze(1)  # sequences of one token
    assert accuracy(tokens, last).item() == 0.75
    assert accuracy(tokens.expand(4, 2, 3), last.expand(4, 2, *last.shape[2:])).item() == 0.75


def test_accuracy_knows_classes_in_the_second_dimension() -> None:
    outputs = OUTPUTS.unsqueeze(2).expand(4, 3, 5)
    assert accuracy(outputs, CLASSES.unsqueeze(1).expand(4, 5)).item() == 0.75


@pytest.mark.parametrize("shape", [(4, 2), (3,), (1, 4), (), (4, 1, 1)])
def test_accuracy_refuses_targets_that_do_not_fit_the_outputs(shape: tuple[int, ...]) -> None:
    with pytest.raises(TaskError, match=r"outputs of shape \(4, 3\) and a target of shape") as e:
        accuracy(OUTPUTS, torch.zeros(shape, dtype=torch.long))
    assert f"target of shape {shape};" in str(e.value)
    with pytest.raises(TaskError, match="a target of shape"):
        accuracy(torch.zeros(4, 3, 5, 5), torch.zeros(4, 1, 5, 5))


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
