"""BatchNorm never meets a single value a channel: micro-batches are chosen so, or it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import manyhands as mh
from support.small_task import small_data, small_task


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def over_pixels() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
    )


def train(folder: Path, line: str, samples: int = 96, model: Any = normed, **given: Any) -> Any:
    make = lambda: small_task(model(), **{"train": small_data(samples), **given})
    return mh.train(make, line, directory=folder / "run", quiet=True)


@pytest.mark.parametrize("line", ["data=1", "data=2 batch=8", "micro=2"])
def test_a_last_batch_of_one_sample_is_refused_before_the_start(tmp_path: Path, line: str) -> None:
    with pytest.raises(
        (mh.PlanError, mh.LaunchError),
        match=r"BatchNorm 1 would get .* 1 sample in the last batch .*33 samples.*drop_last=True",
    ):
        train(tmp_path, f"epochs=1 {line}", samples=33)
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_each_rank_of_local_batchnorm_needs_two_samples(tmp_path: Path) -> None:
    with pytest.raises(mh.LaunchError, match=r"1 sample in the last batch.*batchnorm=sync"):
        train(tmp_path, "epochs=1 data=2 batch=8 batchnorm=local", samples=35)
    train(tmp_path / "sync", "epochs=1 data=2 batch=8 batchnorm=sync", samples=35)


def test_a_batch_that_the_run_never_reaches_is_no_reason_to_refuse(tmp_path: Path) -> None:
    assert train(tmp_path, "steps=2", samples=33).rounds == 2


def test_one_image_of_several_pixels_is_enough(tmp_path: Path) -> None:
    assert train(tmp_path, "epochs=1", samples=33, model=over_pixels).rounds == 3


def test_micro_is_chosen_so_that_batchnorm_sees_two_samples(tmp_path: Path) -> None:
    train(tmp_path, "pipe=2 batch=8 steps=2")  # 8 micro-batches would be of 1 sample
    plan = (tmp_path / "run" / "plan.toml").read_text()
    assert "micro = 4" in plan


def test_micro_of_the_users_is_refused_where_it_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(mh.LaunchError, match=r"BatchNorm 1 would get .* in every batch.*micro=8"):
        train(tmp_path, "pipe=2 batch=8 micro=8 steps=2")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(zip(*small_data(33), strict=True)))


@pytest.mark.parametrize("line", ["data=1", "data=2 batch=8"])
def test_what_cannot_be_known_before_is_said_when_it_comes(tmp_path: Path, line: str) -> None:
    with pytest.raises(
        (mh.TaskError, mh.LaunchError), match=r"BatchNorm .*got 1 sample of shape \(6,\).*batch="
    ):
        train(tmp_path, f"epochs=1 split=ordered {line}", train=Stream())


def test_the_users_model_has_no_hooks_afterwards(tmp_path: Path) -> None:
    model = normed()
    train(tmp_path, "steps=1", model=lambda: model)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert torch.isfinite(model(torch.randn(2, 8))).all()
