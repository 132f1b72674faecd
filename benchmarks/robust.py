"""Robust merging: LeNet on Fashion-MNIST with five workers, one of which lies about its gradients.

The test accuracy of every robust aggregation against that of an honest run, and against plain
averaging with the same liar.

    random     noise of unit variance in every coordinate
    flipped    minus ten times the true gradient: with it the mean of five points the wrong way

Plain averaging has SGD with momentum 0.9; robust merging has the same learning rate with that
momentum moved to the workers, which without a liar is the same arithmetic. The learning rate falls
to zero over the run. A claim is that of the worse lie; ratio = accuracy / (honest - 0.02), so 1 is
two points below the honest run. `plain_fails` shows that the lies are worth guarding against: it is
the same bar over what plain averaging reaches with the kinder of them.
"""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, get_args

import torch
from common import Claim, cores
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import manyhands as mh
from manyhands import datasets
from manyhands.errors import ManyhandsError
from manyhands.launch.environment import place
from manyhands.merge.robust import How

WORKERS = 5
LIAR = 3
MARGIN = 0.02
MOMENTUM = 0.9
LIES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "random": lambda g, draw: torch.randn(g.shape, generator=draw),
    "flipped": lambda g, draw: -10 * g,
}


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def task(lie: str | None, momentum: float, steps: int) -> mh.Task:
    model = lenet()
    if lie is not None and place().rank == LIAR:
        draw = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.register_hook(functools.partial(LIES[lie], draw=draw))
    _, train, test = datasets.images()
    return mh.Task(
        model=model,
        loss=cross_entropy,
        train=train,
        test=test,
        batch=64,
        metrics={"accuracy": mh.accuracy},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=momentum),
        steps=steps,
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda step: max(0.0, 1 - step / steps)
        ),
    )


def accuracy(how: str | None, lie: str | None, steps: int) -> float:
    """On the test data at the end; a run that breaks down with NaN has learnt nothing."""
    words = (
        "merge=all_reduce"
        if how is None
        else f"merge=robust merge.how={how} merge.momentum={MOMENTUM}"
    )
    make = functools.partial(task, lie, MOMENTUM if how is None else 0.0, steps)
    with tempfile.TemporaryDirectory() as folder:
        try:
            plan = f"data={WORKERS} threads=1 save=off device=cpu {words}"
            return mh.train(make, plan, directory=f"{folder}/run", quiet=True).metrics["accuracy"]
        except ManyhandsError as e:
            if "NaN" not in str(e):
                raise
            return 0.0


def measure(quick: bool, only: list[str]) -> list[Claim]:
    steps = 30 if quick else 1880  # ten epochs
    hows = [how for how in get_args(How) if not only or how in only]
    hows = hows[:1] if quick and not only else hows
    plain_too = not only or "plain_fails" in only
    runs: list[tuple[str | None, str | None]] = [
        (None, None),
        *((how, lie) for how in hows for lie in LIES),
    ]
    runs += [(None, lie) for lie in LIES if plain_too]
    # accuracy is counted, not time: where there are cores, several runs go on at once, each started
    # by a process of its own
    with ProcessPoolExecutor(
        max(1, cores() // WORKERS), multiprocessing.get_context("spawn")
    ) as pool:
        found = dict(zip(runs, pool.map(_accuracy_of, runs, [steps] * len(runs)), strict=True))
    honest = found[None, None]
    bar = honest - MARGIN
    claims = []
    if plain_too:
        plain = {lie: found[None, lie] for lie in LIES}
        kindest = max(plain.values())
        claims.append(
            Claim(
                "plain_fails",
                bar,
                kindest,
                "accuracy",
                bar / max(kindest, 1e-9),
                1.0,
                shown(honest, plain),
            )
        )
    for how in hows:
        with_liar = {lie: found[how, lie] for lie in LIES}
        worst = min(with_liar.values())
        claims.append(
            Claim(how, worst, bar, "accuracy", worst / bar, 1.0, shown(honest, with_liar))
        )
    return claims


def _accuracy_of(run: tuple[str | None, str | None], steps: int) -> float:
    return accuracy(*run, steps)


def shown(honest: float, found: dict[str, float]) -> dict[str, Any]:
    return {
        "honest": f"{honest:.4f}",
        **{f"with {lie} gradients": f"{value:.4f}" for lie, value in found.items()},
    }
