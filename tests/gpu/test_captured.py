"""CUDA graphs: a captured step is the eager step, falls back by itself, and resumes.

Run by hand: pytest -m gpu.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

import manyhands as mh
from manyhands.observe.events import read
from manyhands.recover.checkpoint import Checkpoints
from manyhands.replica.captured import CapturedReplica

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class Net(nn.Module):
    def __init__(self, reads_back: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.reads_back = reads_back
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        if (
            self.reads_back and float(out.sum()) > 1e9
        ):  # the host waits for the GPU: cannot be captured
            out = out * 0
        return out


def task(
    reads_back: bool = False, dropout: float = 0.0, samples: int = 1000, **given: Any
) -> mh.Task:
    data = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 16, generator=data)
    y = (x[:, :4].argmax(1)).long()
    return mh.Task(
        model=Net(reads_back, dropout),
        loss=nn.functional.cross_entropy,
        train=(x, y),
        test=(x, y),
        metrics={"accuracy": mh.accuracy},
        batch=64,
        optimizer=given.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        **given,
    )


class Kind(mh.Callback):
    replica: object = None

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        Kind.replica = run.trainer.replica


def weights(result: mh.Result) -> dict[str, Tensor]:
    saved = Checkpoints(Path(result.directory) / "checkpoints").latest()
    assert saved is not None
    return saved.params


def notices(result: mh.Result) -> list[str]:
    return [str(e.value) for e in read(Path(result.directory)) if e.name == "notice"]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam-schedule": lambda p: torch.optim.Adam(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_run_equals_an_eager_run_with_an_uneven_last_batch(
    tmp_path: Path, name: str
) -> None:
    schedule = (
        (lambda o: torch.optim.lr_scheduler.StepLR(o, 7, gamma=0.8)) if "schedule" in name else None
    )

    def make() -> mh.Task:
        return task(optimizer=OPTIMIZERS[name], schedule=schedule, clip=0.5)

    captured = mh.train(
        make, "device=cuda epochs=3", directory=tmp_path / "a", quiet=True, callbacks=(Kind(),)
    )
    assert isinstance(Kind.replica, CapturedReplica) and Kind.replica._update is not None
    eager = mh.train(make, "device=cuda epochs=3 capture=off", directory=tmp_path / "b", quiet=True)
    for key, value in weights(eager).items():
        torch.testing.assert_close(weights(captured)[key], value, rtol=1e-4, atol=1e-6)
    assert captured.metrics["accuracy"] > 0.8


def test_a_model_that_reads_back_runs_eagerly_and_says_so_once(tmp_path: Path) -> None:
    result = mh.train(
        lambda: task(reads_back=True),
        "device=cuda epochs=2",
        directory=tmp_path / "run",
        quiet=True,
    )
    said = [n for n in notices(result) if "captured" in n]
    assert len(said) == 1 and "eagerly" in said[0]
    eager = mh.train(
        lambda: task(reads_back=True),
        "device=cuda epochs=2 capture=off",
        directory=tmp_path / "b",
        quiet=True,
    )
    for key, value in weights(eager).items():
        torch.testing.assert_close(weights(result)[key], value, rtol=1e-4, atol=1e-6)


def test_a_captured_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    whole = mh.train(task, "device=cuda steps=40 save=20", directory=tmp_path / "whole", quiet=True)
    mh.train(task, "device=cuda steps=20 save=20", directory=tmp_path / "half", quiet=True)
    resumed = mh.train(
        task, "device=cuda steps=40 save=20", directory=tmp_path / "half", resume=True, quiet=True
    )
    for key, value in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "words", ["precision=bf16", "precision=fp16", "compile=true", "accumulate=2"]
)
def test_precision_compile_and_accumulation_train_on_a_gpu(tmp_path: Path, words: str) -> None:
    torch._inductor.config.compile_threads = (
        1  # no pool of compiler processes that outlives the test
    )
    result = mh.train(task, f"device=cuda epochs=4 {words}", directory=tmp_path / "run", quiet=True)
    assert result.metrics["accuracy"] > 0.8


def test_dropout_draws_new_masks_in_every_replay(tmp_path: Path) -> None:
    losses: list[float] = []

    class Watch(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            losses.append(float(loss))

    frozen = dict(optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    mh.train(
        lambda: task(dropout=0.5, samples=64, **frozen),
        "device=cuda epochs=12",
        directory=tmp_path / "run",
        quiet=True,
        callbacks=(Watch(),),
    )
    assert len(set(losses)) == len(
        losses
    )  # the same batch and weights each time: only the masks differ


def test_more_ranks_than_gpus_is_refused_with_a_number(tmp_path: Path) -> None:
    many = torch.cuda.device_count() + 1
    with pytest.raises(mh.LaunchError, match="GPU"):
        mh.train(task, f"device=cuda data={many}", directory=tmp_path / "run", quiet=True)


def test_a_group_over_nccl_reduces(tmp_path: Path) -> None:
    import torch.distributed as dist

    from manyhands.exchange import collective

    group = collective.connect(0, 1, dist.HashStore(), "nccl", 60.0, torch.device("cuda", 0))
    values = torch.arange(5.0, device="cuda")
    group.all_reduce({"x": values}).wait()
    torch.cuda.synchronize()
    assert values.tolist() == [0, 1, 2, 3, 4]
    group.close()
