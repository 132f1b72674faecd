"""Words of model parallelism that one GPU has a use for: they train what the plain plan trains."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

import manyhands as mh
from manyhands.recover.checkpoint import Checkpoints
from support.paths import zoo_task

pytestmark = pytest.mark.gpu


def made(name: str) -> mh.Task:
    return zoo_task(name)


def trained(folder: Path, name: str, words: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    result = mh.train(
        functools.partial(made, name), f"device=cuda steps=6 {words}", directory=folder, quiet=True
    )
    found = Checkpoints(folder / "checkpoints").latest()
    assert found is not None
    return found.params, result.metrics


def test_the_forecast_is_near_the_allocators_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wide() -> mh.Task:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU()) for _ in range(8))
        )
        x = torch.randn(1024, 2048)
        return mh.Task(
            model=model,
            loss=torch.nn.functional.mse_loss,
            train=(x, x),
            optimizer=lambda p: torch.optim.Adam(p),
            batch=256,
        )

    before = torch.cuda.memory_allocated() / 1e6  # what graphs of other tests have captured stays
    mh.train(wide, "device=cuda steps=4 save=off capture=off", directory=tmp_path / "run")
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if "measured" in line]
    measured, forecast = _numbers(line)
    assert forecast == pytest.approx(measured - before, rel=0.15)


def _numbers(line: str) -> tuple[float, float]:
    words = line.split("measured ")[1].replace(",", "").split()
    return float(words[0]), float(words[-1])


@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt", "seq2seq"])
def test_computing_again_changes_no_number(model: str, tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "plain", model, "capture=off")
    again, _ = trained(tmp_path / "again", model, "recompute=true")
    assert plain.keys() == again.keys()
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt", "seq2seq"])
@pytest.mark.parametrize(
    "words", ["precision=bf16 recompute=true", "shard=1 tensor=1 pipe=1", "micro=4"]
)
def test_it_trains_to_about_the_same_loss(model: str, words: str, tmp_path: Path) -> None:
    _, plain = trained(tmp_path / "plain", model, "")
    _, other = trained(tmp_path / "other", model, words)
    assert other["loss"] == pytest.approx(plain["loss"], rel=0.05)
