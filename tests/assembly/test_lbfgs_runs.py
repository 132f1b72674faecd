"""Whole runs under mh.LBFGS in this process: optima, resumption, randomness, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import DataLoader, Dataset, IterableDataset

import manyhands as mh
from manyhands.recover.checkpoint import Checkpoints, load
from support.small_task import saved_weights

N = 40
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 6, generator=G), torch.randint(3, (N,), generator=G)
L2 = 1e-3


def task(model: nn.Module | None = None, **given: Any) -> mh.Task:
    known: dict[str, Any] = {
        "model": model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        "loss": cross_entropy,
        "train": (X, Y),
        "batch": N,
        "optimizer": mh.LBFGS,
    }
    return mh.Task(**{**known, **given})


def train(folder: Path, words: str = "epochs=5", resume: bool = False, **given: Any) -> mh.Result:
    def make() -> mh.Task:
        return task(**{k: v() if k == "model" else v for k, v in given.items()})

    return mh.train(make, words, directory=folder, resume=resume, quiet=True)


def notices(folder: Path) -> list[str]:
    lines = (
        json.loads(line)
        for file in sorted(folder.glob("events/*.jsonl"))
        for line in file.read_text().splitlines()
    )
    return [e["value"] for e in lines if e["name"] in ("notice", "warning")]


class Losses(mh.Callback):
    """The loss at the start of every step, and how often the model ran."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        self.losses.append(float(loss))


class Counting(nn.Module):
    """A model that counts its forward passes."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        Counting.passes += 1
        return self.inner(x)


# -- optima --


def cancer() -> tuple[Tensor, Tensor]:
    x, y = load_breast_cancer(return_X_y=True)
    return torch.tensor((x - x.mean(0)) / x.std(0)), torch.tensor(y, dtype=torch.float64)


def penalised(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    margins = model(x).squeeze(-1) * (2 * y - 1)
    return softplus(-margins).mean() + L2 / 2 * model.weight.square().sum()


def cancer_optimum() -> tuple[np.ndarray, float]:
    x, y = (t.numpy() for t in cancer())
    solved = LogisticRegression(C=1 / (L2 * len(x)), tol=1e-12, max_iter=10_000).fit(x, y)
    w = np.append(solved.coef_[0], solved.intercept_)
    margins = (x @ w[:-1] + w[-1]) * (2 * y - 1)
    return w, float(np.logaddexp(0, -margins).mean() + L2 / 2 * w[:-1] @ w[:-1])


@pytest.mark.parametrize("words", ["epochs=60", "epochs=60 micro=4"])
def test_logistic_regression_reaches_the_optimum_that_is_known(tmp_path: Path, words: str) -> None:
    seen = Losses()
    train(
        tmp_path,
        words + " save=60",
        model=lambda: nn.Linear(30, 1).double(),
        train=cancer(),
        batch=569,
        loss=None,
        step=penalised,
        callbacks=[seen],
    )
    w, optimum = cancer_optimum()
    assert seen.losses[-1] == pytest.approx(optimum, abs=1e-10)
    found = saved_weights(tmp_path)
    assert np.allclose(np.append(found["weight"][0], found["bias"]), w, atol=1e-4)


def test_a_loss_that_is_a_sum_has_the_same_optimum(tmp_path: Path) -> None:
    """The sum is as much larger as there are samples; only the first trial step depends on it."""
    mean, total = Losses(), Losses()
    common = {"model": lambda: nn.Linear(6, 3).double(), "train": (X.double(), Y)}
    train(tmp_path / "mean", "epochs=40 save=off", callbacks=[mean], **common)
    summed = nn.CrossEntropyLoss(reduction="sum")
    more: dict[str, Any] = {"loss": summed, "reduction": "sum", "callbacks": [total]}
    train(tmp_path / "sum", "epochs=40 save=off micro=3", **common, **more)
    assert total.losses[-1] == pytest.approx(mean.losses[-1], abs=1e-9)


# -- how often it evaluates --


def test_a_full_gradient_is_computed_once_a_step_where_the_first_trial_holds(
    tmp_path: Path,
) -> None:
    Counting.passes = 0
    train(tmp_path, "epochs=12 save=off", model=Counting)
    assert Counting.passes < 12 + 2 + 8  # one each, two to begin with, and few longer searches


def test_micro_batches_change_nothing_but_the_order_of_summation(tmp_path: Path) -> None:
    """An odd number of samples, in pieces: all of them in every evaluation."""
    for words, folder in (("", "whole"), (" micro=7", "pieces")):
        model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        train(tmp_path / folder, "epochs=6" + words, model=model, train=(X.double(), Y))
    whole, pieces = saved_weights(tmp_path / "whole"), saved_weights(tmp_path / "pieces")
    for name in whole:
        assert torch.allclose(whole[name], pieces[name], rtol=1e-11, atol=1e-12), name


def test_a_part_of_the_data_is_a_step_of_its_own_and_is_told(tmp_path: Path) -> None:
    train(tmp_path, "epochs=3 batch=16")
    assert any("a step of LBFGS is by 16 of 40 samples" in n for n in notices(tmp_path))


# -- randomness and buffers --


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def test_dropout_drops_the_same_units_in_every_evaluation_of_a_step(tmp_path: Path) -> None:
    """Else the search would compare losses of different functions, and find no decrease."""
    seen = Losses()
    train(tmp_path, "epochs=15 save=off", model=dropping, callbacks=[seen])
    assert seen.losses[-1] < 0.8 * seen.losses[0]


def test_batchnorm_moves_its_statistics_once_a_step(tmp_path: Path) -> None:
    train(tmp_path, "epochs=7", model=dropping)
    assert int(saved_weights(tmp_path)["1.num_batches_tracked"]) == 7


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise of a generator of its own, which nobody can put back."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + float(self.random.normal()), Y[i]


def test_samples_that_change_between_two_evaluations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(mh.TaskError, match="two evaluations of one batch at the same parameters"):
        train(tmp_path, train=Noisy())


# -- resumption --


@pytest.mark.parametrize("words", ["", " micro=3", " batch=16", " split=sampled"])
@pytest.mark.parametrize("model", ["plain", "dropping"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, model: str, words: str) -> None:
    made = {
        "plain": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        "dropping": dropping,
    }[model]
    few = lambda p: mh.LBFGS(p, history=3)
    limit = " save=13 steps=13"
    train(tmp_path / "whole", words + limit, model=made, optimizer=few)
    train(tmp_path / "half", words + " save=6 steps=6", model=made, optimizer=few)
    train(tmp_path / "half", words + limit, resume=True, model=made, optimizer=few)
    whole, half = (
        Checkpoints(tmp_path / name / "checkpoints").latest() for name in ("whole", "half")
    )
    assert whole is not None and half is not None and whole.round == half.round == 13
    assert whole.meta["optimizer"] == half.meta["optimizer"]
    for kind in ("params", "optimizer", "rng"):
        ours, theirs = getattr(whole, kind), getattr(half, kind)
        assert ours.keys() == theirs.keys(), kind
        assert all(torch.equal(ours[k], theirs[k]) for k in ours), kind


def test_a_checkpoint_holds_the_history_by_parameter(tmp_path: Path) -> None:
    train(tmp_path, "epochs=4", optimizer=lambda p: mh.LBFGS(p, history=2))
    saved = load(tmp_path / "checkpoints" / "step-00000004")
    keys = {name.rpartition("/")[2] for name in saved.optimizer}
    assert keys == {"s0", "y0", "s1", "y1", "gradient"}
    assert saved.optimizer["0.weight/s1"].shape == saved.params["0.weight"].shape
    assert len(saved.meta["optimizer"]["groups"][0]["pairs"]) == 2


# -- refusals --


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(X, Y, strict=True)


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3))


def looked_up() -> nn.Module:
    return nn.Sequential(mh.Embedding("t", 4), nn.Flatten(), nn.Linear(24, 3))


def hooked(parameters: Any) -> mh.LBFGS:
    optimizer = mh.LBFGS(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("words", "given", "says"),
    [
        ("merge=local_sgd", {}, "merge=local_sgd lets replicas take steps of their own"),
        ("merge=robust", {}, "merge=robust does not give the gradient of one loss to all ranks"),
        ("then=diloco at=epoch:2", {}, "then=diloco lets replicas take steps of their own"),
        ("merge=downpour servers=1", {}, "merge=downpour"),
        ("compress=int8", {}, "compress=int8 changes the gradient"),
        ("precision=bf16", {}, "precision=bf16 rounds losses more coarsely"),
        ("clip=1.0", {}, "clip=1 changes the gradient"),
        ("", {"clip": 2.0}, "clip=2 changes the gradient"),
        ("", {"train": Stream()}, "the training data is a stream, which is read once"),
        ("loaders=2", {"train": Noisy()}, "loaders=2 fetches every sample once a step"),
        ("", {"model": sparse}, "an embedding with sparse=True gives sparse gradients"),
        ("", {"model": looked_up}, "rows of mh.Embedding are updated where they are stored"),
        ("", {"optimizer": hooked}, "the optimizer has a hook before or after its step"),
    ],
)
def test_what_leaves_a_step_without_one_loss_is_refused_by_name(
    tmp_path: Path, words: str, given: dict[str, Any], says: str
) -> None:
    with pytest.raises((mh.TaskError, mh.PlanError), match=says):
        train(tmp_path, f"epochs=1 {words}", **given)


def test_torch_s_own_is_refused_and_names_ours(tmp_path: Path) -> None:
    with pytest.raises(mh.TaskError, match=r"torch\.optim\.LBFGS .* use mh\.LBFGS"):
        train(tmp_path, optimizer=torch.optim.LBFGS)


def test_workers_of_a_data_loader_are_left_out_and_that_is_told(tmp_path: Path) -> None:
    pairs = [(X[i], Y[i]) for i in range(N)]
    train(tmp_path, "epochs=2", train=DataLoader(pairs, batch_size=N, num_workers=2))
    assert any("the DataLoader's 2 workers are not used" in n for n in notices(tmp_path))
