"""Assembly of a trainer: what cannot be trained is refused with what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from support.small_task import small_task


def test_parameters_of_the_optimizer_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    stranger = nn.Parameter(torch.ones(()))
    with pytest.raises(mh.TaskError, match="not the model's"):
        mh.train(
            lambda: small_task(optimizer=lambda p: torch.optim.SGD([*p, stranger], lr=0.1)),
            directory=tmp_path / "run",
            quiet=True,
        )


def test_sparse_embeddings_train_alone_and_are_refused_over_ranks(tmp_path: Path) -> None:
    def make() -> mh.Task:
        net = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 3))
        return small_task(net, train=(torch.randint(0, 50, (96, 4)), torch.randint(0, 3, (96,))))

    mh.train(make, "steps=3", directory=tmp_path / "alone", quiet=True)
    with pytest.raises(mh.LaunchError, match="sparse=False"):
        mh.train(make, "steps=3 data=2", directory=tmp_path / "two", quiet=True)
