"""Workers of real runs are killed with -9: the run goes on, ends with 0, and every sample of every
epoch counts once."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch

from manyhands.observe.events import read
from support.commands import STOPPED_S, Command, command, wait_until_gone
from support.counting import BATCH, COUNTING, counting, kill, processes, seen
from support.small_task import saved_weights


def started(job: Command, rank: int, processes_before: int = 0) -> None:
    job.until(
        lambda: len(processes(job, rank)) > processes_before,
        f"process {processes_before} of rank {rank} at work",
    )


@pytest.mark.parametrize(
    ("words", "weight", "victims"),
    [
        ("merge=downpour merge.n_push=2 servers=2 elastic=1:3", 1.0, (1, 0)),
        pytest.param("staleness=1 servers=1 elastic=1:3", 1 / 3, (2,), marks=pytest.mark.slow),
    ],
    ids=["downpour", "bounded staleness"],
)
def test_a_run_outlives_its_workers_and_counts_every_sample_once(
    tmp_path: Path, words: str, weight: float, victims: tuple[int, ...]
) -> None:
    line = counting(tmp_path, words)
    chance = random.Random(words)
    with command(tmp_path, line) as job:
        for rank in range(3):
            started(job, rank)
        for victim in victims:  # also 0, which writes and reports
            job.until(lambda: chance.random() < 0.02, "a moment by chance")
            kill(job, victim)
            started(job, victim, 1)
        (tmp_path / "enough").touch()
        assert job.end() == 0, job.err
    weights, epochs = seen(tmp_path)
    assert torch.allclose(weights, torch.full_like(weights, epochs * weight), rtol=1e-12), (
        weights.min(),
        weights.max(),
        epochs,
    )
    assert (weights == weights[0]).all(), "every sample as often as every other"
    told = [(e.name, str(e.value)) for e in read(tmp_path / "run") if e.name.startswith("worker")]
    for rank in victims:
        assert any(n == "worker lost" and f"rank {rank} is lost" in v for n, v in told), told
        assert any(n == "worker joined" and f"rank {rank} has joined" in v for n, v in told), told
        assert f"rank {rank} (pid {processes(job, rank)[0]}) was killed by SIGKILL" in job.err
    assert "is lost" in job.out and "has joined" in job.out
    wait_until_gone([p for rank in range(3) for p in processes(job, rank)], STOPPED_S)


@pytest.mark.slow
def test_with_fewer_workers_than_the_least_a_run_saves_and_ends(tmp_path: Path) -> None:
    line = counting(tmp_path, "merge=downpour servers=1 elastic=2:3")
    with command(tmp_path, line) as job:
        for rank in range(3):
            started(job, rank)
        for rank in (1, 2):
            kill(job, rank)
        assert job.end() == 1
    assert "at least 2; go on from the last checkpoint with --resume" in job.err
    # what is left has saved: whole steps, none of them twice
    weights = -saved_weights(tmp_path / "run")["seen"] * BATCH
    assert float(weights.max() - weights.min()) <= 1


DYING = (
    COUNTING.replace("        time.sleep(0.002)\n", "        time.sleep(0.002)\n        die(2)\n")
    .replace("        name = Path", "        die(3)\n        name = Path")
    .replace("def task():\n", "def task():\n    die(1)\n")
    + """
def die(rank):
    if int(os.environ["RANK"]) == rank and os.environ["MANYHANDS_STARTS"] == "0":
        os.kill(os.getpid(), 9)
"""
)


@pytest.mark.slow
def test_workers_that_die_before_they_join_or_in_their_first_step_are_replaced(
    tmp_path: Path,
) -> None:
    """Rank 1 before it has joined, 2 in its first step, 3 after its push and before its report."""
    line = counting(tmp_path, "merge=downpour servers=1 elastic=1:4")
    (tmp_path / "task.py").write_text(DYING)
    with command(tmp_path, line) as job:
        for rank in range(4):
            started(job, rank)
        (tmp_path / "enough").touch()
        assert job.end() == 0, job.err
    weights, epochs = seen(tmp_path)
    assert (weights == epochs).all(), (weights.min(), weights.max(), epochs)
    for rank in (1, 2, 3):
        assert f"rank {rank} (pid" in job.err


@pytest.mark.slow
def test_a_worker_that_hangs_is_taken_for_dead_and_replaced(tmp_path: Path) -> None:
    line = counting(tmp_path, "merge=dc_asgd servers=2 elastic=1:3 lease_s=1")
    with command(tmp_path, line) as job:
        for rank in range(3):
            started(job, rank)
        os.kill(processes(job, 1)[-1], signal.SIGSTOP)
        started(job, 1, 1)
        (tmp_path / "enough").touch()
        assert job.end() == 0, job.err
    weights, epochs = seen(tmp_path)
    assert (weights == epochs).all(), (weights.min(), weights.max(), epochs)
    assert "said nothing any more and was taken for dead" in job.err
