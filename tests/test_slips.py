"""Slips of the first week: each is answered in one line that says what was given and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.errors import TaskError

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
IMAGES = (X * 40 + 120).clamp(0, 255).to(torch.uint8)


def task(**given: Any) -> mh.Task:
    plain = {
        "model": nn.Linear(4, 2),
        "train": (X, Y),
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.5),
        "loss": F.cross_entropy,
        "batch": 16,
    }
    return mh.Task(**{**plain, **given})


def train(folder: Path, made: Any, **options: Any) -> mh.Result:
    return mh.train(made, "device=cpu", directory=folder / "run", quiet=True, argv=False, **options)


class Stop(mh.Callback):
    """A callback of a user's."""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)},
            "optimizer is a SGD, but a function of the parameters is needed",
        ),
        (
            {
                "schedule": torch.optim.lr_scheduler.StepLR(
                    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), 1
                )
            },
            "schedule is a StepLR, but a function of the optimizer is needed",
        ),
        ({"loss": "cross_entropy"}, "loss is 'cross_entropy', but a function is needed"),
        ({"loss": None, "step": {"loss": 1}}, "step is {'loss': 1}, but a function is needed"),
        ({"loss": nn.CrossEntropyLoss}, r"give an instance, CrossEntropyLoss\(\)"),
        ({"callbacks": Stop()}, r"callbacks is a Stop, .*: callbacks=\[Stop\(\)\]"),
        ({"callbacks": Stop}, r"callbacks is a Stop, .*: callbacks=\[Stop\(\)\]"),
        ({"callbacks": [Stop]}, r"give an instance, Stop\(\)"),
    ],
)
def test_an_object_in_place_of_a_function_and_the_like_are_refused_by_the_task(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(TaskError, match=says) as refused:
        task(**given)
    assert "\n" not in str(refused.value)


def test_the_class_of_a_model_is_a_function_that_makes_it(tmp_path: Path) -> None:
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 2))

    assert train(tmp_path, task(model=Net, steps=2)).rounds == 2


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (nn.Linear(4, 2), "the task is a Linear, but a manyhands.Task, or a function"),
        ("task", "the task is a str"),
        (lambda lr: task(), "task() is called without arguments, but needs 'lr'"),
        (lambda: None, "task() returned a NoneType, .*; end it with return mh.Task"),
    ],
)
def test_a_task_that_is_no_function_of_a_task_is_refused(
    tmp_path: Path, made: Any, says: str
) -> None:
    with pytest.raises(TaskError, match=says.replace("(", r"\(").replace(")", r"\)")):
        train(tmp_path, made)


@pytest.mark.parametrize("callbacks", [Stop(), [Stop]])
def test_callbacks_of_a_run_are_refused_as_those_of_a_task(tmp_path: Path, callbacks: Any) -> None:
    with pytest.raises(TaskError, match=r"Stop\(\)"):
        train(tmp_path, task(), callbacks=callbacks)


# -- data --


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([X.tolist(), Y.tolist()], r"list of lists of numbers.*\(torch.tensor\(x\)"),
        (X.tolist(), "list of lists of numbers"),
        ((X.tolist(), Y.tolist()), r"a tuple of list; tensors .*\(torch.tensor\(x\) of a list\)"),
        ([(x.tolist(), int(y)) for x, y in zip(X, Y, strict=True)], "holds a list of numbers"),
        ([{"x": x.tolist(), "y": 0} for x in X], "holds a list of numbers"),
    ],
)
def test_python_lists_of_numbers_are_refused_as_data(tmp_path: Path, data: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        train(tmp_path, task(train=data))


def test_a_list_of_pairs_of_tensors_and_numbers_is_a_data_set(tmp_path: Path) -> None:
    pairs = [(x, int(y)) for x, y in zip(X, Y, strict=True)]
    assert train(tmp_path, task(train=pairs)).epochs == 1.0


def test_a_batch_larger_than_the_data_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = task(batch=1000)
    mh.train(made, "device=cpu steps=2", directory=tmp_path / "run", argv=False)
    said = capsys.readouterr().out
    assert "a step takes 1000 samples (batch=1000), but the training data has 64" in said


# -- what a batch holds --


def image_step(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"train": (IMAGES, Y)}, r"inputs of uint8, .* float32: scale images, x.float\(\) / 255"),
        (
            {"train": (IMAGES.view(-1, 1, 2, 2), Y), "model": lambda: nn.Conv2d(1, 2, 2)},
            "inputs of uint8",
        ),
        ({"train": (X.double(), Y)}, r"inputs of float64, .*x.to\(torch.float32\)"),
        ({"train": (X.long(), Y)}, "inputs of int64, which the model cannot compute with"),
        (
            {"train": (IMAGES, Y), "loss": None, "step": image_step},
            r"the batch has uint8, which step= cannot compute with; .*x.float\(\) / 255",
        ),
        (
            {"train": (X, Y.int()), "loss": None, "step": image_step},
            r"the batch has int32, .* int64, y.long\(\)",
        ),
        (
            {"train": (X, Y[:, None])},
            r"shape \(16, 1\), but the loss needs one class a sample, \(16,\); give y.squeeze",
        ),
        ({"train": (X, Y.int())}, r"targets are int32 of shape \(16,\), .*give y.long\(\)"),
        ({"train": (X, Y.short())}, r"targets are int16 .*give y.long\(\)"),
        ({"train": (X, Y.float())}, r"targets are float32 of shape \(16,\), .*give y.long\(\)"),
        (
            {"train": (X, F.one_hot(Y))},
            r"targets are int64 of shape \(16, 2\), but the loss needs floats; give y.float\(\)",
        ),
        (
            {
                "train": (X, Y[:, None]),
                "model": nn.Linear(4, 1),
                "loss": F.binary_cross_entropy_with_logits,
            },
            r"but the loss needs floats; give y.float\(\)",
        ),
        (
            {"train": (X, Y + 9)},
            r"target (9|10), but the model's outputs have 2 classes \(0 to 1\); give the last",
        ),
        ({"train": (X, Y - 1)}, "target -1, but the model's outputs have 2 classes"),
        (
            {"train": (X, Y + 9), "loss": None, "step": image_step},
            "target (9|10) is no class of the model's outputs",
        ),
        (
            {"train": (Y + 4, Y), "model": lambda: nn.Embedding(5, 2)},
            r"the batch has an id of 5, but nn.Embedding has 5 rows \(0 to 4\)",
        ),
        (
            {"train": (Y.float(), Y), "model": lambda: nn.Embedding(5, 2)},
            r"ids of float32.*x.long\(\)",
        ),
        ({"loss": None, "step": lambda m, b: {"loss": m(b[0]).mean()}}, "the value of 'loss'"),
        ({"loss": None, "step": lambda m, b: None}, "returned None, .*; end it with return loss"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_a_model_or_a_loss_cannot_compute_with_is_said_before_the_first_step(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    rounds: list[int] = []

    class Count(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            rounds.append(round)

    with pytest.raises(TaskError, match=says) as refused:
        train(tmp_path, task(callbacks=[Count()], **given))
    assert "\n" not in str(refused.value) and rounds == []


@pytest.mark.parametrize(
    "given",
    [
        {"train": (X, Y.to(torch.uint8))},  # torch takes them for classes
        {"train": (Y.int(), Y), "model": lambda: nn.Embedding(5, 2)},
        {
            "train": (IMAGES, Y),
            "loss": None,
            "step": lambda m, b: image_step(m, (b[0].float() / 255, b[1])),
        },
        {"train": (X, F.one_hot(Y).float())},
    ],
)
def test_what_torch_computes_with_is_not_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    train(tmp_path, task(steps=2, **given))


def own_mistake(model: nn.Module, batch: Any) -> Tensor:
    raise RuntimeError("dtype of my own")


@pytest.mark.parametrize("error", [own_mistake, lambda m, b: [][1]])
def test_an_error_of_the_users_own_stays_as_it_is(
    tmp_path: Path, error: Callable[..., Any]
) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"dtype of my own|list index"):
        train(tmp_path, task(loss=None, step=error))
