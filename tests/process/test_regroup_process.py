"""Ranks of real runs are killed with -9: the others go on without them, a new process joins, and
every sample of every epoch counts once."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from manyhands.recover.checkpoint import Checkpoints
from support.commands import (
    CLI,
    STOPPED_S,
    Command,
    command,
    left_in_shared_memory,
    run,
    wait_until_gone,
)
from support.counting import (
    BATCH,
    LEARNING,
    counting,
    counts_alike,
    everyone,
    kill,
    launch,
    living,
    regroupings,
    seen,
)
from support.small_task import saved_weights

GLOBAL = 3 * BATCH  # samples of a step of three ranks, and of fewer after a loss


def at_work(job: Command, size: int) -> None:
    """Wait until `size` processes compute, each in a rank of its own."""
    job.until(lambda: len(living(job)) >= size, f"{size} ranks at work")


def regrouped(job: Command, data: int, times: int = 1) -> None:
    """Wait for the n-th time that the run goes on with so many replicas."""

    def there() -> bool:
        return sum(found == data for found, _, _ in regroupings(job.folder)) >= times

    job.until(there, f"data={data} for the {times}. time")


def nothing_is_left(job: Command) -> None:
    pids = list(everyone(job))
    wait_until_gone(pids, STOPPED_S)
    assert not left_in_shared_memory(pids)


def ended(job: Command) -> None:
    """Let the run end at the end of an epoch: with 0, and with nothing left behind."""
    (job.folder / "enough").touch()
    assert job.end() == 0, job.err
    nothing_is_left(job)


def every_sample_counts_once(folder: Path) -> None:
    weights, epochs = seen(folder, GLOBAL)
    counts_alike(weights, epochs)


def test_a_run_outlives_its_ranks_and_counts_every_sample_once(tmp_path: Path) -> None:
    with command(tmp_path, counting(tmp_path, "data=3 elastic=1:3")) as job:
        at_work(job, 3)
        first = kill(job, 0)  # it writes and reports
        regrouped(job, 3)
        second = kill(job, 2)
        regrouped(job, 3, 2)
        ended(job)
    every_sample_counts_once(tmp_path)
    told = regroupings(tmp_path)
    assert [data for data, _, _ in told] == [2, 3, 2, 3], told
    for pid in (first, second):
        assert any(f"pid {pid}) was killed by SIGKILL" in text for _, _, text in told), told
        assert f"(pid {pid}) was killed by SIGKILL; 2 replicas at work" in job.err


@pytest.mark.slow
@pytest.mark.parametrize("words", ["merge=local_sgd merge.period=4", "link=gloo"])
def test_so_does_one_with_local_steps_and_one_over_gloo(tmp_path: Path, words: str) -> None:
    with command(tmp_path, counting(tmp_path, f"data=3 elastic=1:3 {words}")) as job:
        at_work(job, 3)
        kill(job, 1)
        regrouped(job, 3)
        ended(job)
    every_sample_counts_once(tmp_path)
    assert [data for data, _, _ in regroupings(tmp_path)] == [2, 3]


@pytest.mark.slow
def test_a_spare_takes_the_seat_of_a_dead_rank_at_once(tmp_path: Path) -> None:
    line = counting(tmp_path, "data=3 elastic=1:3 spares=1 respawn=false")
    with command(tmp_path, line) as job:
        at_work(job, 3)
        kill(job, 0)
        regrouped(job, 3)
        kill(job, 1)  # there is no spare any more
        regrouped(job, 2)
        ended(job)
    every_sample_counts_once(tmp_path)
    assert [data for data, _, _ in regroupings(tmp_path)] == [3, 2]


@pytest.mark.slow
def test_with_fewer_than_the_least_it_waits_saves_and_can_be_resumed(tmp_path: Path) -> None:
    words = "data=3 elastic=2:3 respawn=false wait_s=0.5"
    with command(tmp_path, counting(tmp_path, words)) as job:
        at_work(job, 3)
        for rank in (0, 1):
            kill(job, rank)
        assert job.end() == 1
        nothing_is_left(job)
    assert "needs at least 2" in job.err and "--resume" in job.err
    (tmp_path / "enough").touch()
    again = run(tmp_path, [*CLI, "run", "task.py", "--resume", "--dir", "run"])
    assert again.process.returncode == 0, again.err
    every_sample_counts_once(tmp_path)


@pytest.mark.slow
def test_ranks_that_are_all_killed_at_once_lose_no_count(tmp_path: Path) -> None:
    """Nobody has kept anything: the run begins again where a start would, or says why not."""
    with command(tmp_path, counting(tmp_path, "data=3 elastic=1:3 save=20")) as job:
        at_work(job, 3)
        job.until(lambda: bool(Checkpoints(tmp_path / "run" / "checkpoints").all()), "a checkpoint")
        first = living(job)
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        job.until(lambda: len(living(job) - first) >= 3, "three new ranks")
        ended(job)
    every_sample_counts_once(tmp_path)


@pytest.mark.slow
def test_a_replacement_that_cannot_load_its_task_ends_nobody_else(tmp_path: Path) -> None:
    with command(tmp_path, counting(tmp_path, "data=3 elastic=1:3")) as job:
        at_work(job, 3)
        (tmp_path / "task.py").write_text("def task(:\n")
        kill(job, 1)
        regrouped(job, 2)
        job.until(lambda: "no further process is started" in job.err, "end of the attempts")
        ended(job)
    every_sample_counts_once(tmp_path)


@pytest.mark.slow
def test_a_second_launcher_for_one_directory_is_refused(tmp_path: Path) -> None:
    line = counting(tmp_path, "data=2 elastic=1:2")
    with command(tmp_path, line) as job:
        at_work(job, 2)
        second = run(tmp_path / "second", [*line[:-1], str(tmp_path / "run")])
        assert second.process.returncode == 2, second.err
        ended(job)


@pytest.mark.slow
def test_a_stop_during_a_regrouping_saves_and_ends_with_143(tmp_path: Path) -> None:
    with command(tmp_path, counting(tmp_path, "data=3 elastic=1:3")) as job:
        at_work(job, 3)
        kill(job, 1)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end() == 143, job.err
        nothing_is_left(job)
    saved = saved_weights(tmp_path / "run")["seen"] * -GLOBAL
    assert float(saved.max() - saved.min()) < 1 + 1e-9, "whole steps, none of them twice"


@pytest.mark.slow
def test_a_second_death_while_ranks_regroup_after_the_first(tmp_path: Path) -> None:
    with command(tmp_path, counting(tmp_path, "data=4 elastic=1:4 batch=3")) as job:
        at_work(job, 4)
        kill(job, 3)
        job.until(lambda: "3 replicas at work" in job.err, "the first loss seen")
        kill(job, 0)
        regrouped(job, 4)
        ended(job)
    every_sample_counts_once(tmp_path)


# -- the same numbers as a run that is stopped and resumed --

STEPS = 400


def final(folder: Path) -> dict[str, torch.Tensor]:
    saved = Checkpoints(folder / "run" / "checkpoints").latest()
    assert saved is not None and saved.position.steps == STEPS
    return saved.params


def resumed(folder: Path, words: str, at: int, after: str) -> dict[str, torch.Tensor]:
    """The model of a run that is saved at round `at`, and goes on with other words."""
    first = run(folder, launch(folder, f"{words} steps={at}", LEARNING))
    assert first.process.returncode == 0, first.err
    more = [*after.split(), f"steps={STEPS}", "--resume", "--dir", "run"]
    second = run(folder, [*CLI, "run", "task.py", *more])
    assert second.process.returncode == 0, second.err
    return final(folder)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [k for k in found if not torch.equal(found[k], expected[k])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "inner"),
    [(3, ""), (2, "tensor=2"), (2, "shard=2"), (2, "pipe=2")],
    ids=["data", "tensor", "shard", "pipe"],
)
def test_after_a_loss_the_numbers_are_those_of_a_run_saved_there_and_resumed(
    tmp_path: Path, replicas: int, inner: str
) -> None:
    words, lost = f"data={replicas} {inner}", tmp_path / "lost"
    elastic = f"{words} elastic=1:{replicas} respawn=false steps={STEPS}"
    with command(lost, launch(lost, elastic, LEARNING)) as job:
        at_work(job, replicas * (2 if inner else 1))
        kill(job, 1)
        assert job.end() == 0, job.err
        nothing_is_left(job)
    ((data, at, _),) = regroupings(lost)
    assert data == replicas - 1 and 0 < at < STEPS
    same(final(lost), resumed(tmp_path / "calm", words, at, f"data={data} {inner}"))


@pytest.mark.slow
def test_where_all_who_held_a_part_of_the_model_died_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    """Ranks 1 and 3 hold the same half of the model; one of them takes the seat of the other half,
    and must not bring its own."""
    words, lost = "data=2 tensor=2", tmp_path / "lost"
    elastic = f"{words} elastic=1:2 respawn=false save=10 steps={STEPS}"
    with command(lost, launch(lost, elastic, LEARNING)) as job:
        at_work(job, 4)
        for rank in (0, 2):
            kill(job, rank)
        assert job.end() == 0, job.err
        nothing_is_left(job)
    (at,) = map(int, re.findall(r"resumed at round (\d+)", job.out))
    assert 0 < at < STEPS
    same(final(lost), resumed(tmp_path / "calm", words, at, "data=1 tensor=2"))
