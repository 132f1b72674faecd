"""Random split with a skeleton, and split by feature, over real processes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.entry import work
from manyhands.launch.environment import process_info
from manyhands.recover.checkpoint import Checkpoints
from support.pooled import start

G = torch.Generator().manual_seed(0)
PROTOTYPES = torch.randn(4, 1, 12, 12, generator=G)
Y = torch.randint(4, (480,), generator=G)
X = PROTOTYPES[Y] + torch.randn(480, 1, 12, 12, generator=G)


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12 * 25, 40),
        nn.ReLU(),
        nn.Linear(40, 4),
    )


def task() -> mh.Task:
    torch.manual_seed(0)
    return mh.Task(
        model=lenet(),
        loss=nn.functional.cross_entropy,
        train=(X[:400], Y[:400]),
        test=(X[400:], Y[400:]),
        batch=10,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        metrics={"accuracy": mh.accuracy},
    )


def linear() -> mh.Task:
    torch.manual_seed(0)
    x = X.flatten(1).double()
    return mh.Task(
        model=nn.Linear(144, 4).double(),
        loss=nn.functional.cross_entropy,
        train=(x[:400], Y[:400]),
        test=(x[400:], Y[400:]),
        batch=20,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        metrics={"accuracy": mh.accuracy},
        steps=30,
    )


RUNS = {
    "step": {"merge": "skeleton", "merge.core": 0.3, "merge.explore": 0.3},
    "block": {"merge": "skeleton", "merge.core": 0.3, "merge.explore": 0.3, "merge.period": 4},
    "dealt": {"merge": "skeleton", "merge.draw": "disjoint", "compress": "bf16"},
    "changed": {"merge": "skeleton", "merge.core": 0.3, "then": "all_reduce", "at": "epoch:2"},
}


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    found = {}
    for name, said in RUNS.items():
        here = Options(quiet=True, directory=f"{folder}/{name}")
        found[name] = work(task, {**words, **said, "epochs": 4, "save": "off"}, here)["metrics"]
    if process_info().rank == 0:
        Path(folder, "results.json").write_text(json.dumps(found))
    return {}


def test_a_small_lenet_learns_with_most_of_its_units_left_out(tmp_path: Path) -> None:
    start(functools.partial(every, str(tmp_path)), "data=2 timeout_s=60", Options(quiet=True))
    found = json.loads((tmp_path / "results.json").read_text())
    assert found.keys() == RUNS.keys()
    for name, metrics in found.items():
        assert metrics["accuracy"] > 0.9, (name, metrics)


def test_columns_shared_out_over_ranks_train_and_save_what_one_process_does(tmp_path: Path) -> None:
    alone = work(linear, {}, Options(quiet=True, directory=str(tmp_path / "alone")))
    shared = start(
        functools.partial(work, linear),
        "tensor=3 split=by_feature timeout_s=60",
        Options(quiet=True, directory=str(tmp_path / "three")),
    )
    assert shared.metrics["loss"] == pytest.approx(alone["metrics"]["loss"], rel=1e-9)
    saved = [Checkpoints(tmp_path / run / "checkpoints").latest() for run in ("alone", "three")]
    assert saved[0] is not None and saved[1] is not None
    assert saved[0].params.keys() == saved[1].params.keys()
    for name, value in saved[0].params.items():
        torch.testing.assert_close(saved[1].params[name], value, rtol=1e-10, atol=1e-12)
