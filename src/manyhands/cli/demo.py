"""`manyhands demo`: train LeNet with several processes, and measure the speed-up on this machine.

The speed-up compares one process with N processes, run in turn; each process has one thread and the
same number of samples.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import datasets
from manyhands.api import train
from manyhands.errors import TaskError
from manyhands.launch import environment
from manyhands.observe.progress import open_screen
from manyhands.observe.text import duration
from manyhands.task import Callback, Task, accuracy

WARM_STEPS, TIMED_STEPS, TIMED_BATCH = 10, 150, 64
DIGITS_EPOCHS = 10  # for each epoch of Fashion-MNIST, which has forty times as many pictures
RUNS = 3  # of each kind, in turn: another busy program slows both; the median counts


class LeNet(nn.Sequential):
    """LeNet-5 with ReLU and max-pooling."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )


def task(folder: str | None, fashion: bool) -> Task:
    """The task of the demo, built in every process."""
    data, test = datasets.fashion_mnist(folder) if fashion else datasets.digits()
    # a small data set needs smaller batches, to make enough steps
    lr, batch = (0.05, 64) if fashion else (0.02, 32)
    return Task(
        model=LeNet(),
        loss=nn.functional.cross_entropy,
        train=data,
        test=test,
        optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
        metrics={"accuracy": accuracy},
        batch=batch,
    )


def untested(make: Callable[[], Task]) -> Task:
    """The same task without evaluation, which would run between the timed steps."""
    return dataclasses.replace(make(), test=None, metrics={})


class Timed(Callback):
    """Seconds from the end of one round to the end of a later one, as rank 0 sees them."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self.started_s = self.seconds = 0.0

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        if round == self.first:
            self.started_s = time.perf_counter()
        elif round == self.last:
            self.seconds = time.perf_counter() - self.started_s
            run.trainer.metrics = {"seconds": self.seconds}

    def on_epoch(self, run: Any, epoch: int, metrics: Mapping[str, float]) -> None:
        # the last round may end an epoch, which sets metrics of its own
        run.trainer.metrics = {"seconds": self.seconds}


def demo(data: Path | None, workers: int, epochs: int) -> None:
    started, busy = time.perf_counter(), _busy()
    where = _where(data)
    name, (_, train_labels), (_, test_labels) = datasets.images(data)
    fashion = name == "Fashion-MNIST"
    found = f"{len(train_labels):,} pictures to train on, {len(test_labels):,} to test"
    if fashion:
        say("data", f"Fashion-MNIST, {where or 'downloaded into the cache'}: {found}")
    else:
        say("data", f"digits of scikit-learn: {found}")
        say("notice", name.removeprefix("digits (").removesuffix(")"), "yellow")
        epochs *= DIGITS_EPOCHS
    say(
        "training",
        f"LeNet-5 for {_count(epochs, 'epoch')} with {_count(workers, 'process')} on the CPU",
    )
    make = functools.partial(task, None if data is None else str(data), fashion)
    result = train(make, f"data={workers} epochs={epochs} device=cpu", name="demo")
    if result.stopped:
        raise KeyboardInterrupt
    if workers > 1 and busy > 0.5:
        say(
            "notice",
            f"other programs were running before the demo started (load {busy:.1f}), "
            "which lowers the speed-up",
            "yellow",
        )
    speeds = measure(make, workers) if workers > 1 else {}
    say("accuracy", f"{result.metrics['accuracy']:.1%} of the test pictures, each counted once")
    say(
        "speed-up",
        describe(speeds, workers)
        if speeds
        else "not measured: that needs more than one process (--workers 2)",
    )
    say("picture", f"{result.directory}/curves.png")
    say("all in", duration(time.perf_counter() - started))


def measure(make: Callable[[], Task], workers: int) -> dict[int, list[float]]:
    """Samples a second of one process and of `workers`, one thread each, several times in turn."""
    say(
        "measuring",
        f"one process against {workers}, {RUNS} times in turn: "
        f"{TIMED_STEPS} steps of {TIMED_BATCH} samples for every process, one thread each",
    )
    speeds: dict[int, list[float]] = {1: [], workers: []}
    threads = torch.get_num_threads()
    try:
        for turn in range(RUNS):
            for n in (1, workers) if turn % 2 == 0 else (workers, 1):
                speeds[n].append(_speed(make, n))
    finally:
        torch.set_num_threads(threads)  # the runs with one process were in this one
    return speeds


def describe(speeds: dict[int, list[float]], workers: int) -> str:
    one, many = (statistics.median(speeds[n]) for n in (1, workers))
    cores = environment.cores()
    short = (
        f"; {_count(workers, 'process')} share {_count(cores, 'core')} here"
        if cores < workers
        else ""
    )
    return (
        f"{many / one:.2f}x over one process (medians: {one:,.0f} and {many:,.0f} samples/s{short})"
    )


def say(label: str, text: str, style: str = "bold") -> None:
    screen = open_screen(sys.stdout)
    screen.line(label, text, style)
    screen.refresh()  # at once: the processes write to the same place


def _speed(make: Callable[[], Task], workers: int) -> float:
    last = WARM_STEPS + TIMED_STEPS
    words = f"data={workers} batch={TIMED_BATCH} steps={last} threads=1 save=off device=cpu"
    with tempfile.TemporaryDirectory(prefix="manyhands-demo-") as folder:
        result = train(
            functools.partial(untested, make),
            words,
            directory=f"{folder}/run",
            quiet=True,
            callbacks=(Timed(WARM_STEPS, last),),
        )
    if result.stopped:
        raise KeyboardInterrupt
    return TIMED_STEPS * TIMED_BATCH * workers / result.metrics["seconds"]


def _where(data: Path | None) -> str:
    """Where Fashion-MNIST was found, as text; "" where it is not on this machine yet."""
    if data is not None:
        if not data.expanduser().is_dir():
            raise TaskError(
                f"--data {data}: there is no such folder; "
                "give the one that holds Fashion-MNIST, or leave --data out"
            )
        if not _holds(data.expanduser()):
            names = ", ".join(datasets.FASHION_MNIST_SHA256)
            raise TaskError(
                f"--data {data} does not hold Fashion-MNIST: {names} are needed there "
                "or in fashion-mnist/ there; or leave --data out"
            )
        return f"found in {data}"
    named = environment.variables().get("MANYHANDS_DATA")
    if named and _holds(Path(named).expanduser()):
        return "found in MANYHANDS_DATA"
    return "found in the cache" if _holds(datasets.cache()) else ""


def _holds(folder: Path) -> bool:
    def there(place: Path, name: str) -> bool:
        return (place / name).is_file() or (place / name.removesuffix(".gz")).is_file()

    return any(
        all(there(place, name) for name in datasets.FASHION_MNIST_SHA256)
        for place in (folder, folder / "fashion-mnist")
    )


def _busy() -> float:
    """The load average of the last minute, read before our processes start."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not on Windows
        return 0.0


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith('s') else 's'}"
