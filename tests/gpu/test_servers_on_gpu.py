"""Server strategies and embeddings with the model on a GPU and tables in main memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.recover.checkpoint import Checkpoints

pytestmark = pytest.mark.gpu

X = torch.randn(256, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
IDS = torch.randint(-(2**62), 2**62, (256, 3), generator=torch.Generator().manual_seed(1))


class Click(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = mh.Embedding("ids", 8, optimizer="sgd", lr=0.5), nn.Linear(24, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.rows(ids).flatten(1))
        return out


def dense() -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)),
        loss=nn.functional.cross_entropy,
        train=(X, Y),
        test=(X, Y),
        metrics={"accuracy": mh.accuracy},
        batch=16,
        epochs=3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.5),
    )


def click() -> mh.Task:
    return mh.Task(
        model=Click,
        loss=nn.functional.cross_entropy,
        train=(IDS, Y),
        test=(IDS, Y),
        metrics={"accuracy": mh.accuracy},
        batch=16,
        epochs=10,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.2),
    )


def saved(folder: Path) -> dict[str, Tensor]:
    found = Checkpoints(folder / "checkpoints").latest()
    assert found is not None
    return found.params


@pytest.mark.parametrize(
    "words", ["merge=downpour", "staleness=0", "merge=dc_asgd", "merge=async_easgd"]
)
def test_one_worker_on_a_gpu_over_a_server_trains_as_without(words: str, tmp_path: Path) -> None:
    plain = mh.train(
        dense, "data=1 device=cuda capture=off", directory=tmp_path / "plain", quiet=True
    )
    served = mh.train(
        dense, f"data=1 device=cuda servers=1 {words}", directory=tmp_path / "served", quiet=True
    )
    assert plain.metrics["accuracy"] > 0.9 and served.metrics["accuracy"] > 0.85
    if "easgd" not in words:
        a, b = saved(tmp_path / "plain"), saved(tmp_path / "served")
        assert all(torch.allclose(a[k], b[k], rtol=1e-4, atol=1e-5) for k in a)


@pytest.mark.parametrize("servers", [0, 1])
def test_embeddings_of_a_model_on_a_gpu_learn(servers: int, tmp_path: Path) -> None:
    done = mh.train(
        click, f"data=1 device=cuda servers={servers}", directory=tmp_path / "run", quiet=True
    )
    assert done.metrics["accuracy"] > 0.9, (
        "three ids a sample and no repeats: all of it can be learnt by heart"
    )
