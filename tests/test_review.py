"""What a review found, each as a sentence: runs that looked right and were not."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.api import start, work
from manyhands.assembly.rank_context import Options
from manyhands.recover.checkpoint import Checkpoints, load, read_manifest


def data(samples: int = 96, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, width, generator=generator), torch.randint(
        0, 3, (samples,), generator=generator
    )


def task(model: Any = None, **given: Any) -> mh.Task:
    given.setdefault("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))
    given.setdefault("train", data())
    return mh.Task(model=model or nn.Linear(8, 3), loss=cross_entropy, batch=16, **given)


def weights(folder: Path) -> dict[str, Tensor]:
    saved = Checkpoints(folder / "checkpoints").latest()
    assert saved is not None
    return saved.params


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 3)
    )  # each weight lies in several owned blocks


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_adam_resumes_over_ranks_that_own_several_slices_of_a_parameter(tmp_path: Path) -> None:
    def make() -> mh.Task:
        return task(wide(), optimizer=adamw)

    def runs(words: dict[str, Any], options: Options) -> dict[str, Any]:
        """One after the other in the same two processes."""
        whole, half = (
            dataclasses.replace(options, directory=str(tmp_path / name))
            for name in ("whole", "half")
        )
        work(make, {**words, "steps": 10}, whole)
        work(make, {**words, "steps": 5}, half)
        return work(make, {**words, "steps": 10}, dataclasses.replace(half, resume=True))

    start(runs, "data=2 save=5", Options(quiet=True))
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "half")[key], value), key
    steps = {
        k: float(v)
        for k, v in load(tmp_path / "half/checkpoints/step-00000010").optimizer.items()
        if k.endswith("/step")
    }
    assert set(steps.values()) == {10.0}


def test_a_channels_last_model_resumes_to_the_last_bit(tmp_path: Path) -> None:
    images = (
        torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(64) % 3,
    )

    def make() -> mh.Task:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)).to(
            memory_format=torch.channels_last
        )
        return task(net, train=images, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    mh.train(make, "steps=6 save=3", directory=tmp_path / "whole", quiet=True)
    mh.train(make, "steps=3 save=3", directory=tmp_path / "half", quiet=True)
    mh.train(make, "steps=6 save=3", directory=tmp_path / "half", resume=True, quiet=True)
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "half")[key], value), key


def test_parameters_that_became_nan_behind_a_finite_loss_are_not_saved(tmp_path: Path) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.line(x)
            return out + (out * 0).abs().sqrt()  # 0, with a gradient of 0 times infinity

    with pytest.raises(mh.Diverged, match="though the loss was"):
        mh.train(lambda: task(Root()), "steps=3 save=1", directory=tmp_path / "run", quiet=True)
    assert not Checkpoints(tmp_path / "run/checkpoints").all()


def test_the_best_checkpoint_is_one_that_was_evaluated(tmp_path: Path) -> None:
    mh.train(
        lambda: task(test=data(30)),
        "epochs=3 save=4 best=-loss keep=9",
        directory=tmp_path / "run",
        quiet=True,
    )
    saved = Checkpoints(tmp_path / "run/checkpoints", best="-loss")
    known = {p.name: read_manifest(p)["metrics"] for p in saved.all()}
    assert known["step-00000004"] == {} and known["step-00000006"] and known["step-00000012"]
    assert saved.best_path() is not None


def test_a_run_that_ends_in_the_middle_of_an_epoch_is_evaluated(tmp_path: Path) -> None:
    result = mh.train(
        lambda: task(test=data(30)), "steps=2", directory=tmp_path / "run", quiet=True
    )
    assert "loss" in result.metrics


def test_parts_in_eval_mode_stay_so_after_an_evaluation(tmp_path: Path) -> None:
    kept: list[bool] = []

    class Watch(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            kept.append(net[1].training)

    net = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5).eval(), nn.Linear(4, 3))
    mh.train(
        lambda: task(net, test=data(30)),
        "epochs=2",
        directory=tmp_path / "run",
        quiet=True,
        callbacks=(Watch(),),
    )
    assert kept and not any(kept)


def test_parameters_of_the_optimizer_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    stranger = nn.Parameter(torch.ones(()))
    with pytest.raises(mh.TaskError, match="not the model's"):
        mh.train(
            lambda: task(optimizer=lambda p: torch.optim.SGD([*p, stranger], lr=0.1)),
            directory=tmp_path / "run",
            quiet=True,
        )


def test_a_parameter_that_thaws_during_training_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
    net[0].requires_grad_(False)

    class Thaw(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            net[0].requires_grad_(True)

    with pytest.raises(mh.TaskError, match="frozen when training started"):
        mh.train(
            lambda: task(net),
            "steps=3",
            directory=tmp_path / "run",
            quiet=True,
            callbacks=(Thaw(),),
        )


def test_sparse_embeddings_train_alone_and_are_refused_over_ranks(tmp_path: Path) -> None:
    def make() -> mh.Task:
        net = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 3))
        return task(net, train=(torch.randint(0, 50, (96, 4)), torch.randint(0, 3, (96,))))

    mh.train(make, "steps=3", directory=tmp_path / "alone", quiet=True)
    with pytest.raises(mh.LaunchError, match="sparse=False"):
        mh.train(make, "steps=3 data=2", directory=tmp_path / "two", quiet=True)


def test_a_finished_run_lets_go_of_its_model(tmp_path: Path) -> None:
    alive = []

    def make() -> mh.Task:
        net = nn.Linear(8, 3)
        alive.append(weakref.ref(net))
        return task(net)

    for i in range(2):
        mh.train(make, "steps=2", directory=tmp_path / str(i), quiet=True)
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


class Again(nn.Module):
    """A layer that is used twice under reentrant checkpointing: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.again, x, use_reentrant=True)  # type: ignore[assignment]
        out: Tensor = self.last(x)
        return out


class Seen(nn.Module):
    """BatchNorm, a reshape by batch size that an empty batch would break, and a branch that only some ranks take."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.sometimes, self.last = nn.Linear(4 * 36, 4 * 36), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        x = x.view(x.size(0), -1)
        if float(x.detach().sum()) > 0:
            x = self.sometimes(x)
        out: Tensor = self.last(x.relu())
        return out


def test_over_ranks_reentrant_checkpoints_are_refused_and_batchnorm_keeps_its_order(
    tmp_path: Path,
) -> None:
    with pytest.raises(mh.LaunchError, match="use_reentrant=False"):
        mh.train(
            lambda: task(Again()),
            "data=2 steps=2 bucket_mb=0.0001",
            directory=tmp_path / "again",
            quiet=True,
        )
    images = (
        torch.randn(33, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(33) % 3,
    )  # one left over
    words = "data=2 epochs=2 bucket_mb=0.0001"
    result = mh.train(
        lambda: task(Seen(), train=images), words, directory=tmp_path / "seen", quiet=True
    )
    assert result.epochs == 2.0 and all(
        v.isfinite().all() for v in weights(tmp_path / "seen").values()
    )
