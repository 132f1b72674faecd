"""Schedules that would train with other learning rates than their author meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

import manyhands as mh
from support.small_task import small_data, small_task

DATA = small_data(40)  # 3 steps an epoch


def train(folder: Path, words: str, **given: Any) -> str:
    """The warnings of a run."""
    result = mh.train(
        lambda: small_task(**{"train": DATA, "test": DATA, **given}),
        f"device=cpu {words}",
        directory=folder / "run",
        quiet=True,
        argv=False,
    )
    files = Path(result.directory).glob("events/*.jsonl")
    events = [json.loads(line) for f in files for line in f.read_text().splitlines()]
    return "\n".join(e["value"] for e in events if e["name"] == "warning")


def of_another(optimizer: Any) -> lr.LRScheduler:
    return lr.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"schedule": of_another}, "a StepLR of another optimizer, so that the learning rate"),
        ({"schedule": lambda: None}, "schedule takes no argument, but it is called with the opt"),
        (
            {"schedule": lambda o, n: lr.CosineAnnealingLR(o, n), "schedule_by": "epoch"},
            "schedule_by='epoch' does not step it so often; leave schedule_by out",
        ),
        (
            {"schedule": lambda o: lr.OneCycleLR(o, 0.1, total_steps=8)},
            "OneCycleLR was made for 8 steps, but this run steps it 9 times; take the number",
        ),
        (
            {
                "schedule": lambda o: lr.OneCycleLR(o, 0.1, total_steps=2),
                "schedule_by": "epoch",
            },
            "OneCycleLR was made for 2 steps, but this run steps it 3 times",
        ),
        (
            {"schedule": lambda o: lr.ReduceLROnPlateau(o, mode="max")},
            r"ReduceLROnPlateau\(mode='max'\) takes a larger loss for a better one; give mode='",
        ),
        ({"schedule": lr.LinearLR, "schedule_by": None}, "schedule_by=None, but 'step', 'epoch'"),
    ],
)
def test_rates_that_cannot_be_meant_are_refused_before_the_first_step(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(mh.TaskError, match=says):
        train(tmp_path, "epochs=3", **given)
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (
            lambda o: lr.OneCycleLR(o, 0.1, total_steps=18),  # of one process, where two share
            "OneCycleLR was made for 18 steps, but this run steps it 9 times, so that",
        ),
        (lambda o: lr.StepLR(o, 2), "StepLR(step_size=2) is stepped after every optimizer step, 9"),
        (lambda o: lr.CosineAnnealingLR(o, 3), "CosineAnnealingLR(T_max=3) is stepped after ever"),
        (lambda o: lr.MultiStepLR(o, [1, 3]), "MultiStepLR(milestones=[1, 3]) is stepped after"),
        (lambda o: lr.ExponentialLR(o, 0.3), "in this run of 3 epochs; if it counts epochs, give"),
    ],
)
def test_rates_that_are_rarely_meant_are_doubted(
    tmp_path: Path, schedule: Callable[[Any], lr.LRScheduler], says: str
) -> None:
    assert says in train(tmp_path, "epochs=3", schedule=schedule)


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": lambda o: lr.StepLR(o, 2), "schedule_by": "epoch"},
        {"schedule": lambda o: lr.CosineAnnealingLR(o, 9)},
        {"schedule": lambda o: lr.MultiStepLR(o, [4, 8])},
        {"schedule": lambda o: lr.ExponentialLR(o, 0.9)},
        {"schedule": lambda o: lr.OneCycleLR(o, 0.1, total_steps=9)},
        {"schedule": lambda o, n: lr.OneCycleLR(o, 0.1, total_steps=n)},
        {"schedule": lambda o: lr.ReduceLROnPlateau(o, mode="max"), "schedule_by": "accuracy"},
    ],
)
def test_what_fits_the_run_is_taken_without_a_word(tmp_path: Path, given: dict[str, Any]) -> None:
    metrics = {"accuracy": mh.accuracy}
    assert train(tmp_path, "epochs=3", metrics=metrics, **given) == ""


def test_a_plateau_that_waits_for_a_worse_metric_is_doubted(tmp_path: Path) -> None:
    said = train(
        tmp_path,
        "epochs=1",
        schedule=lr.ReduceLROnPlateau,  # mode="min"
        schedule_by="accuracy",
        metrics={"accuracy": mh.accuracy},
    )
    assert "(mode='min') takes a smaller accuracy for a better one; give mode='max'" in said


@pytest.mark.parametrize("name", ["", "-accuracy", "noise"])
def test_a_metric_that_no_goal_could_name_is_refused(name: str) -> None:
    with pytest.raises(mh.TaskError, match=r"a metric is called .*; give it another name"):
        small_task(metrics={name: mh.accuracy})
