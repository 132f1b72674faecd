"""Runs with schedules and callbacks, the same in one process and on two ranks."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr

import manyhands as mh
from manyhands.assembly.rank_context import Options
from manyhands.entry import work

N = 27  # with batches of 4: the last step of an epoch has 3 samples, rank 1 has one of them
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 6, generator=G, dtype=torch.float64), torch.randint(3, (N,), generator=G)
BATCH = 4


class Noted(mh.Callback):
    """Learning rates of all optimizer steps of this rank, and how its run went."""

    def __init__(self, folder: str, rates: list[float]):
        self.folder, self.rates, self.metrics = folder, rates, list[dict[str, float]]()

    def on_evaluate(self, run: Any, metrics: Any) -> None:
        self.metrics.append(dict(metrics))

    def on_end(self, run: Any) -> None:
        trainer = run.trainer
        noted = {
            "rates": self.rates,
            "metrics": self.metrics,
            "steps": trainer.position.steps,
            "rounds": trainer.round,
            "last": dict(trainer.metrics),
        }
        Path(f"{self.folder}/{run.rank}.json").write_text(json.dumps(noted))
        if trainer.context.splits_model:
            return
        state = trainer.checkpoints.module.state_dict()
        save_file(
            {k: v.clone().contiguous() for k, v in state.items()},
            f"{self.folder}/{run.rank}.safetensors",
        )


class Fails(mh.Callback):
    def on_epoch(self, run: Any, epoch: int, metrics: Any) -> None:
        if run.rank == run.size - 1:
            raise ZeroDivisionError("mine")


class StopsOnOneRank(mh.Callback):
    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        if round == 2 and run.rank == run.size - 1:
            run.stop("rank " + str(run.rank))


class Clipped(mh.Callback):
    """Clips each gradient by its own norm."""

    def on_gradient(self, run: Any) -> None:
        for gradient in run.gradients().values():
            gradient.mul_((0.01 / gradient.norm()).clamp(max=1.0))


def one_cycle(optimizer: Any, total_steps: int) -> lr.LRScheduler:
    return lr.OneCycleLR(optimizer, 0.5, total_steps=total_steps)


def halved(optimizer: Any) -> lr.LRScheduler:
    return lr.StepLR(optimizer, 1, 0.5)


def plateau(optimizer: Any) -> lr.LRScheduler:
    return lr.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)


# name -> plan words, what the task has, its callbacks
CASES: dict[str, tuple[str, dict[str, Any], Callable[[], list[mh.Callback]]]] = {
    "one cycle": ("epochs=3", {"schedule": one_cycle}, list),
    "one cycle, accumulated": ("epochs=2.5 accumulate=2", {"schedule": one_cycle}, list),
    "one cycle, local steps": (
        "epochs=3 merge=local_sgd merge.period=5",
        {"schedule": one_cycle},
        list,
    ),
    "by epoch": ("epochs=3", {"schedule": halved, "schedule_by": "epoch"}, list),
    "by epoch, local steps": (
        "epochs=3 merge=local_sgd merge.period=5",
        {"schedule": halved, "schedule_by": "epoch"},
        list,
    ),
    "plateau": ("epochs=6", {"schedule": plateau, "test": (X, Y)}, list),
    "ema": ("epochs=3", {"test": (X, Y)}, lambda: [mh.EMA(0.8, start=3)]),
    "ema, local steps": (
        "epochs=3 merge=local_sgd merge.period=3",
        {"test": (X, Y)},
        lambda: [mh.EMA(0.8)],
    ),
    "swa": ("epochs=4", {"test": (X, Y)}, lambda: [mh.SWA(start=2)]),
    "ema, hogwild local": (
        "epochs=3 merge=hogwild",
        {"test": (X, Y)},
        lambda: [mh.EMA(0.8), mh.BestModel()],
    ),
    "split, one cycle and early": (
        "epochs=9 shard=2",
        {"test": (X, 2 - Y), "schedule": one_cycle},
        lambda: [mh.EarlyStopping(patience=2)],
    ),
    "early": (
        "epochs=40",
        {"test": (X, 2 - Y)},
        lambda: [mh.EarlyStopping(patience=2, restore_best=True)],
    ),
    "stop": ("epochs=400", {"test": (X, Y)}, lambda: [StopsOnOneRank()]),
    "gradients": ("epochs=2", {"test": (X, Y)}, lambda: [Clipped()]),
}


def make(case: str, batch: int, folder: str) -> mh.Task:
    rates: list[float] = []
    held: list[Any] = []

    def optimizer(parameters: Any) -> Any:
        held.append(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return held[-1]

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            rates.append(float(held[-1].param_groups[0]["lr"]))
        return nn.functional.cross_entropy(outputs, target)

    known: dict[str, Any] = dict(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
        loss=loss,
        train=(X, Y),
        batch=batch,
        optimizer=optimizer,
        callbacks=[*CASES[case][2](), Noted(folder, rates)],
    )
    return mh.Task(**{**known, **CASES[case][1]})


def one(case: str, folder: Path, words: dict[str, Any], batch: int, options: Options) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    given = dict(word.split("=") for word in CASES[case][0].split() if word != "shard=2")
    kept = dataclasses.replace(options, directory=str(folder / "run"))
    work(functools.partial(make, case, batch, str(folder)), {**given, **words}, kept)


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    for case, (given, *_) in CASES.items():
        split = {"data": "1", "shard": "2"} if "shard=2" in given else {}
        one(case, Path(folder) / case, {**words, **split}, BATCH // 2, options)
    return {}


def failing(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    def task() -> mh.Task:
        return dataclasses.replace(make("ema", BATCH, folder), callbacks=[Fails()])

    kept = dataclasses.replace(options, directory=f"{folder}/run")
    work(task, {**words, "epochs": "3"}, kept)
    return {}


def read(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found
