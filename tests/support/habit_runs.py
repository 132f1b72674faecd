"""Examples of everyday habits on one process, on two ranks, and with local steps between merges."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.entry import load_task, work
from support.paths import EXAMPLES

# name -> plan words: every example, with its schedule and its callbacks, as its users run it
HABITS = {
    "callbacks": "steps=150 evaluate=10",
    "metrics": "epochs=2",
    "by epoch": "epochs=3 log=csv",
    "plateau": "epochs=6 log=csv",
    "averaged": "epochs=4",
    "fine tuning": "epochs=2",
}
MERGES = {"every gradient": "", "local steps": "merge=local_sgd merge.period=5"}
BATCH = 32
X = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1).clamp(max=2)


class Net(nn.Module):
    """A body that other weights may start, and a head of its own."""

    def __init__(self, classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def pretrained() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return Net(classes=9).state_dict()


class Watched(mh.Callback):
    """What a user of this rank sees: the first weights, rates after every round, all metrics."""

    def __init__(self, folder: str):
        self.folder = folder
        self.rates: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.first = 0.0

    def on_start(self, run: Any) -> None:
        body = getattr(run.trainer.checkpoints.module, "body", None)
        self.first = 0.0 if body is None else float(body[0].weight.detach().sum())

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        self.rates.append(run.trainer.replica.lr)

    def on_evaluate(self, run: Any, metrics: Any) -> None:
        self.metrics.append(dict(metrics))

    def on_end(self, run: Any) -> None:
        noted = {
            "first": self.first,
            "rates": self.rates,
            "metrics": self.metrics,
            "steps": run.trainer.position.steps,
        }
        Path(f"{self.folder}/{run.rank}.json").write_text(json.dumps(noted))


def make(habit: str) -> mh.Task:
    if habit in ("callbacks", "metrics"):
        made: Any = load_task(str(EXAMPLES / f"{habit}.py"))
        return fewer(made())
    known: dict[str, Any] = dict(
        model=lambda: Net(classes=3),
        loss=nn.functional.cross_entropy,
        train=(X, Y),
        test=(X[:100], Y[:100]),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
        metrics={"accuracy": mh.accuracy, "f1": mh.metrics.F1()},
    )
    more: dict[str, dict[str, Any]] = {
        "by epoch": {"schedule": lambda o: lr.StepLR(o, 1, 0.5), "schedule_by": "epoch"},
        "plateau": {
            "schedule": lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=0.2),
            "callbacks": [mh.EarlyStopping(patience=1, min_delta=0.1, restore_best=True)],
        },
        "averaged": {"callbacks": [mh.SWA(start=2), mh.EarlyStopping("f1", patience=9)]},
        "fine tuning": {
            "init": mh.Weights(pretrained(), skip="head.*"),
            "callbacks": [mh.BestModel("f1")],
        },
    }
    return mh.Task(**known, **more[habit])


def fewer(task: mh.Task) -> mh.Task:
    """The example with less of its data, which is evaluated in float64 every few steps."""

    def some(data: Any, n: int) -> Any:
        if isinstance(data, dict):
            return {k: v[:n] for k, v in data.items()}
        return tuple(v[:n] for v in data)

    return dataclasses.replace(task, train=some(task.train, 600), test=some(task.test, 151))


def one(habit: str, folder: Path, words: dict[str, Any], batch: int, options: Options) -> None:
    """Train one example, then evaluate and predict by its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    given = dict(word.split("=") for word in HABITS[habit].split())
    watched = (Watched(str(folder)),)
    kept = dataclasses.replace(options, directory=str(folder / "run"), callbacks=watched)
    made = functools.partial(make, habit)
    work(made, {**words, **given, "batch": str(batch)}, kept)
    device = {k: v for k, v in words.items() if k in ("data", "device", "timeout_s")}
    found = mh.evaluate(made, folder / "run", device)
    mh.predict(made, folder / "run", folder / "rows.npz", device)
    (folder / "evaluated.json").write_text(json.dumps(found))


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    for merge, given in MERGES.items():
        more = dict(word.split("=") for word in given.split())
        for habit in HABITS:
            one(habit, Path(folder) / merge / habit, {**words, **more}, BATCH // 2, options)
    return {}


def read(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found
