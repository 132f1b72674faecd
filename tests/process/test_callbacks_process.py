"""Schedules and callbacks on two ranks: the learning rates, averages and ends of one process."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from manyhands.assembly.rank_context import Options
from manyhands.errors import LaunchError
from manyhands.recover.checkpoint import Checkpoints
from support.callback_runs import BATCH, CASES, every, failing, one, read
from support.pooled import start

ALIKE = [c for c in CASES if "local" not in c and c != "stop"]  # N == 1


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callbacks")
    start(functools.partial(every, str(folder)), "data=2 timeout_s=20", Options(quiet=True))
    return folder


@pytest.mark.parametrize("case", ALIKE)
def test_two_ranks_step_and_end_as_one_process_does(ran: Path, case: str, tmp_path: Path) -> None:
    one(case, tmp_path, {}, BATCH, Options(quiet=True))
    ours, alone = read(ran / case), read(tmp_path)
    extra = int("split" in case)  # whose memory forecast computes one batch before
    assert ours["rates"][extra:] == pytest.approx(alone["rates"], rel=1e-12)
    assert (ours["steps"], ours["rounds"]) == (alone["steps"], alone["rounds"])
    assert len(ours["metrics"]) == len(alone["metrics"])
    for mine, theirs in zip(ours["metrics"], alone["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    assert ours["last"] == pytest.approx(alone["last"], rel=1e-9)
    if "split" in case:
        return
    left, right = load_file(ran / case / "0.safetensors"), load_file(tmp_path / "0.safetensors")
    for key in right:
        torch.testing.assert_close(left[key], right[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", [c for c in CASES if "split" not in c])
def test_both_ranks_end_at_the_same_step_with_the_same_model(ran: Path, case: str) -> None:
    here, there = read(ran / case), read(ran / case, 1)
    assert (here["steps"], here["rounds"]) == (there["steps"], there["rounds"])
    assert here["metrics"] == there["metrics"]
    left, right = load_file(ran / case / "0.safetensors"), load_file(ran / case / "1.safetensors")
    assert all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("case", [c for c in CASES if "split" not in c])
def test_the_last_checkpoint_has_the_model_that_was_left(ran: Path, case: str) -> None:
    saved = Checkpoints(ran / case / "run" / "checkpoints").latest()
    assert saved is not None
    left = load_file(ran / case / "0.safetensors")
    assert all(torch.equal(left[k], saved.params[k]) for k in left)


def test_a_schedule_by_epoch_changes_within_a_block_of_local_steps(ran: Path) -> None:
    rates = read(ran / "by epoch, local steps")["rates"]
    steps = 7  # an epoch of 27 samples, 4 a step
    assert rates == pytest.approx([0.1] * steps + [0.05] * steps + [0.025] * steps)


def test_a_run_stopped_by_one_rank_evaluates_and_saves(ran: Path) -> None:
    found = read(ran / "stop")
    assert 2 <= found["rounds"] < 400 and found["metrics"]
    assert Checkpoints(ran / "stop" / "run" / "checkpoints").latest() is not None


@pytest.mark.parametrize("case", ["ema", "swa"])
def test_a_run_of_two_ranks_is_resumed_by_one_as_if_it_had_been_one(
    ran: Path, case: str, tmp_path: Path
) -> None:
    folder, longer = tmp_path / "of two", {"epochs": "8"}
    shutil.copytree(ran / case, folder)
    one(case, folder, longer, BATCH, Options(quiet=True, resume=True))
    one(case, tmp_path / "whole", longer, BATCH, Options(quiet=True))
    ours, alone = read(folder), read(tmp_path / "whole")
    assert ours["steps"] == alone["steps"] and ours["last"] == pytest.approx(
        alone["last"], rel=1e-9
    )
    left = load_file(folder / "0.safetensors")
    for key, value in load_file(tmp_path / "whole" / "0.safetensors").items():
        torch.testing.assert_close(left[key], value, rtol=1e-9, atol=1e-11)


def test_a_callback_that_raises_on_one_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"Fails.on_epoch raised it, at round 4") as e:
        start(functools.partial(failing, str(tmp_path)), "data=2", Options(quiet=True))
    assert "ZeroDivisionError: mine" in str(e.value)
