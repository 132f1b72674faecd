"""The GAN of the examples in a loop of its own: two ranks have the numbers of one process."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands import datasets, own_loop
from manyhands.assembly.rank_context import Options
from manyhands.entry import work_script
from manyhands.plan import words as plan_words
from manyhands.recover.checkpoint import Checkpoints
from support.paths import EXAMPLES
from support.pooled import start

SCRIPT = str(EXAMPLES / "gan_loop.py")
FEW = 500  # of batches of 128: the last one is shorter
PLANS = {"two": "", "local": "merge=local_sgd merge.period=3"}


@contextmanager
def few_in_float64() -> Iterator[None]:
    name, (x, y), test = datasets.images()
    few, images = (x[:FEW].double(), y[:FEW]), datasets.images
    datasets.images = lambda: (name, few, test)  # type: ignore[assignment]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        datasets.images = images


def every(folder: str, words: dict[str, Any], options: Options) -> dict[str, Any]:
    for name, more in PLANS.items():
        given = {**words, **plan_words.overlay(more)}
        own = Options("gan_loop", f"{folder}/{name}", quiet=True)
        with few_in_float64():
            work_script(SCRIPT, [], given, plan_words.parse(given), own)
    return {}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gan")
    body = functools.partial(every, str(folder))
    start(body, "data=2 device=cpu threads=1 timeout_s=60", Options(quiet=True))
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch, few_in_float64():
        patch.delattr("sys.last_value", raising=False)  # of a test that failed before
        patch.setattr("sys.argv", [SCRIPT, "batch=128", "device=cpu", "--dir", str(folder / "run")])
        runpy.run_path(SCRIPT, run_name="__main__")
        own_loop.close_joined()
    return folder / "run"


def weights(run: Path) -> dict[str, Tensor]:
    saved = Checkpoints(run / "checkpoints").latest()
    assert saved is not None and saved.position.steps == 12
    return saved.params


def test_two_ranks_train_by_the_numbers_of_one_process(ran: Path, alone: Path) -> None:
    ours, theirs = weights(ran / "two"), weights(alone)
    assert ours.keys() == theirs.keys() and {name[0] for name in ours} == {"g", "d"}
    for name, value in theirs.items():
        assert value.dtype == torch.float64
        # Adam divides by the root of a sum of squares, which amplifies the order of summation
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9)


def test_by_local_steps_it_trains_other_numbers(ran: Path, alone: Path) -> None:
    ours, theirs = weights(ran / "local"), weights(alone)
    far = [float((ours[name] - value).abs().max()) for name, value in theirs.items()]
    assert 1e-3 < max(far) < 1
