"""Loss, predict and metrics are tried on a few test samples before training, without an effect."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import manyhands as mh
from manyhands.assembly import trainer
from manyhands.errors import PlanError, TaskError
from manyhands.metrics import AUC, F1, Gathered
from support.small_task import saved_weights, small_data, small_task

X, Y = small_data(30)


class Rounds(mh.Callback):
    """How many rounds a run has done."""

    def __init__(self) -> None:
        self.done = 0

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        self.done = round


def train(path: Path, words: str = "", **given: Any) -> tuple[mh.Result, Rounds]:
    given.setdefault("test", (X, Y))
    rounds = Rounds()
    result = mh.train(
        lambda: small_task(**given),
        f"device=cpu {words}",
        directory=path / "run",
        quiet=True,
        callbacks=(rounds,),
    )
    return result, rounds


def refused(path: Path, says: str, words: str = "", **given: Any) -> None:
    """It is refused before the first step."""
    rounds = Rounds()
    given.setdefault("test", (X, Y))
    kept = small_task(**given)
    with pytest.raises((TaskError, PlanError), match=says):
        mh.train(
            lambda: kept,
            f"device=cpu {words}",
            directory=path / "run",
            quiet=True,
            callbacks=(rounds,),
        )
    assert rounds.done == 0


def broken(outputs: Tensor, target: Tensor) -> Tensor:
    return outputs + target[:, None, None] @ outputs


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"mine": broken}, r"(?s)metric mine failed: .*in broken\n    return outputs \+ target"),
        ({"odd": lambda o, t: {}}, r"metric odd returned a dict, .* \(on a batch of 16 test sampl"),
        ({"f1": Gathered(f1_score)}, r"metric f1 failed: ValueError: .*before training"),
        ({"f1": Gathered(f1_score, lambda o: o.nothing())}, "metric f1 failed: AttributeError"),
        ({"auc": AUC()}, r"metric auc: AUC is for two classes"),
        ({"f1": F1("binary")}, r"metric f1: F1\('binary'\)"),
    ],
)
def test_a_metric_that_fails_ends_the_run_before_its_first_step(
    tmp_path: Path, metrics: dict[str, Any], says: str
) -> None:
    refused(tmp_path, says, metrics=metrics)


def test_a_loss_or_model_that_fails_on_test_data_is_shown_before_training(tmp_path: Path) -> None:
    refused(
        tmp_path,
        r"evaluating a batch of 16 test samples, before training, failed: RuntimeError: mat1",
        test=(X[:, :5], Y),
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("until=f1:0.5", r"until=f1:0.5: no such metric; the task has loss, f1/macro, f1/micro"),
        ("best=f1/weighted", r"best=f1/weighted: no such metric"),
        ("until=accuracy:0.5", r"until=accuracy:0.5: no such metric; the task has loss, f1"),
    ],
)
def test_goals_are_compared_with_the_names_that_an_object_computes(
    tmp_path: Path, words: str, says: str
) -> None:
    several = Gathered(lambda t, p: {"macro": 0.5, "micro": 0.6}, "argmax")
    refused(tmp_path, says, words, metrics={"f1": several})
    plateau = lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)
    refused(
        tmp_path / "by",
        r"schedule_by='f1/all': no such metric; the task has loss, f1/macro, f1/micro",
        metrics={"f1": several},
        schedule=plateau,
        schedule_by="f1/all",
    )
    result, rounds = train(
        tmp_path / "ends", "until=f1/micro:0.6 best=f1/macro epochs=9", metrics={"f1": several}
    )
    assert result.epochs == 1 and result.metrics["f1/micro"] == 0.6 and rounds.done == 6


def test_what_few_samples_cannot_decide_is_a_warning_at_most(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two samples have not all three classes, which the area under the curve needs; sixteen have
    them, unless one class is rare."""
    auc = {"auc": Gathered(roc_auc_score, "softmax", multi_class="ovr")}
    text = "if it needs more samples, all is well"
    result, _ = train(tmp_path / "even", "batch=2 epochs=1", metrics=auc)
    assert 0 < result.metrics["auc"] < 1 and text not in capfd.readouterr().err
    rare = torch.arange(60) % 2
    rare[1] = 2
    data = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), rare
    result, _ = train(tmp_path / "rare", "batch=2 epochs=1", metrics=auc, test=data)
    assert 0 < result.metrics["auc"] < 1 and capfd.readouterr().err.count(text) == 1


class Counting:
    """Counts how often it was asked, over all copies of it."""

    asked: ClassVar[list[int]] = []

    def reset(self) -> None: ...
    def update(self, outputs: Tensor, target: Tensor) -> None:
        self.asked.append(len(outputs))

    def compute(self) -> float:
        return float(len(self.asked))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws from every generator when it is read."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return X[i] + 0 * noise.float(), Y[i]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


def test_nothing_of_the_run_depends_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"model": net, "metrics": {"n": Counting()}, "test": Noisy()}
    Counting.asked.clear()
    with_it, _ = train(tmp_path / "with", **given)
    assert Counting.asked[0] == 16 and with_it.metrics["n"] == 2
    monkeypatch.setattr(trainer, "rehearse", lambda *given: None)
    without, _ = train(tmp_path / "without", **given)
    assert without.metrics["loss"] == with_it.metrics["loss"]
    one, other = (saved_weights(tmp_path / name / "run") for name in ("with", "without"))
    assert all(torch.equal(one[k], other[k]) for k in one | other)


class Read(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    "form",
    [
        DataLoader(Noisy(), 5, num_workers=1),
        Read(),
        DataLoader(Noisy(), 5, sampler=torch.utils.data.SubsetRandomSampler(range(12))),
    ],
    ids=["loaders", "stream", "sampler"],
)
def test_test_data_of_any_form_is_looked_at(tmp_path: Path, form: Any) -> None:
    refused(tmp_path, "metric mine failed", metrics={"mine": broken}, test=form)


def test_an_iterator_is_left_to_the_evaluation(tmp_path: Path) -> None:
    result, _ = train(tmp_path, "epochs=1", test=iter(list(zip(X, Y, strict=True))))
    assert result.metrics["loss"] > 0


def test_rows_of_embeddings_are_not_asked_for(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.out = mh.EmbeddingBag("rehearsed", 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.out(self.rows(ids))
            return out

    ids = torch.arange(60).view(30, 2)
    refused(
        tmp_path,
        "metric mine failed",
        model=Rows,
        train=(ids, Y),
        test=(ids, Y),
        metrics={"mine": broken},
    )


def test_metrics_of_a_step_compare_what_predict_gives(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    def predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch["x"]), batch["y"]

    data = {"x": X, "y": Y}
    metrics = {"accuracy": mh.accuracy, "f1": F1("micro")}
    common: dict[str, Any] = {"train": data, "test": data, "metrics": metrics}

    def task(**more: Any) -> mh.Task:
        return mh.Task(
            model=nn.Linear(8, 3),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            step=step,
            batch=16,
            **{**common, **more},
        )

    result = mh.train(
        lambda: task(predict=predict), "device=cpu", directory=tmp_path / "run", quiet=True
    )
    plain, _ = train(tmp_path / "plain", train=(X, Y), metrics=metrics)
    assert result.metrics == pytest.approx(plain.metrics)
    with pytest.raises(TaskError, match=r"returned 3 values, but \(outputs, target\) is needed"):
        mh.train(
            lambda: task(predict=lambda m, b: (1, 2, 3)), "", directory=tmp_path / "no", quiet=True
        )
    with pytest.raises(TaskError, match=r"(?s)predict=\(model, batch\) failed: KeyError: 'z'.*b\["):
        mh.train(
            lambda: task(predict=lambda m, b: (m(b["z"]), b["y"])),
            directory=tmp_path / "not",
            quiet=True,
        )
