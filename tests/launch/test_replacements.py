"""Replacement of dead ranks: who is replaced, who is not, and when a job cannot go on."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from manyhands.core import ElasticJob
from manyhands.launch import run_token
from manyhands.launch.elastic.worker_replacements import Replacements

TOKEN = "secret"


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


Make = Callable[..., tuple[list[Worker], Replacements]]


@pytest.fixture
def make() -> Iterator[Make]:
    """A job of processes that sleep, and what replaces them."""
    everyone: list[Worker] = []

    def start(rank: int, starts: int = 0) -> Worker:
        everyone.append(Worker(rank, subprocess.Popen(["sleep", "600"])))
        return everyone[-1]

    def made(
        size: int,
        least: int = 1,
        respawns: int = 9,
        reports: dict[int, Any] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> tuple[list[Worker], Replacements]:
        job = ElasticJob(least, respawns, servers=1, timeout_s=60.0, window_s=100.0)
        said = {}.get if reports is None else reports.get
        return [start(rank) for rank in range(size)], Replacements(
            job, start, said, dist.HashStore(), TOKEN, clock=clock
        )

    yield made
    for worker in everyone:
        worker.process.kill()
        worker.process.wait()


def end(worker: Worker, number: int = signal.SIGKILL) -> None:
    worker.process.send_signal(number)
    worker.process.wait()


def told(replacements: Replacements, key: str, value: str = "") -> None:
    replacements.store.set(key, run_token.sign(TOKEN, key, value))


def report(kind: str) -> dict[str, Any]:
    return {"kind": kind, "text": f"{kind}: what it says"}


def test_a_dead_rank_is_replaced_and_said(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    workers, replacements = make(3, least=2)
    end(dead := workers[1])
    assert replacements.replace(workers, stopping=False)
    assert sorted(w.rank for w in workers) == [0, 1, 2] and dead not in workers
    assert replacements.lost == [dead]
    said = capfd.readouterr().err
    assert f"rank 1 (pid {dead.process.pid}) was killed by SIGKILL; 2 at work go on" in said


def test_who_has_not_joined_yet_is_not_at_work(make: Make) -> None:
    workers, replacements = make(3, least=2)
    end(workers[1])
    assert replacements.replace(workers, stopping=False)
    end(workers[0])
    assert not replacements.replace(workers, stopping=False)
    assert "1 at work, but elastic=2:... needs at least 2" in replacements.failure

    workers, replacements = make(3, least=2)
    end(workers[1])
    assert replacements.replace(workers, stopping=False)
    replacements.store.set("joined/1/1", "")  # by somebody who does not know the token
    assert replacements.joining(workers[-1])
    told(replacements, "joined/1/1")
    end(workers[0])
    assert replacements.replace(workers, stopping=False) and not replacements.failure


def test_a_job_goes_on_without_a_rank_when_its_processes_are_used_up(make: Make) -> None:
    workers, replacements = make(3, respawns=1)
    for rank in (0, 1):
        end(next(w for w in workers if w.rank == rank))
        assert replacements.replace(workers, stopping=False)
    assert sorted(w.rank for w in workers) == [0, 2]


def test_an_error_of_its_own_ends_the_job_and_being_taken_for_dead_does_not(make: Make) -> None:
    workers, replacements = make(2, reports={0: report("TaskError"), 1: report("Evicted")})
    end(workers[1])
    assert replacements.replace(workers, stopping=False)
    end(workers[0])
    assert not replacements.replace(workers, stopping=False) and not replacements.failure


def test_one_that_cannot_join_does_not_end_the_job(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    reports: dict[int, Any] = {}
    clock = Clock()
    workers, replacements = make(2, reports=reports, clock=clock)
    end(workers[1])
    assert replacements.replace(workers, stopping=False)
    reports[1] = report("RuntimeError")
    end(workers[1])
    assert replacements.replace(workers, stopping=False) and len(workers) == 1
    clock.now = 1.0
    replacements.start_due(workers)
    assert len(workers) == 2
    assert "could not join: RuntimeError: what it says" in capfd.readouterr().err


def test_nobody_is_replaced_in_a_job_that_stops_or_is_over(make: Make) -> None:
    workers, replacements = make(2, least=2)
    end(workers[1])
    assert replacements.replace(workers, stopping=True)
    assert [w.rank for w in workers] == [0] and not replacements.failure

    workers, replacements = make(2)
    end(workers[1])
    assert replacements.replace(workers, stopping=False)
    assert not replacements.superfluous(workers)
    workers[0].process.kill()
    workers[0].process.wait()
    workers[0].process.returncode = 0  # it has done everything
    assert [w.rank for w in replacements.superfluous(workers)] == [1]


def test_one_that_hangs_and_was_taken_for_dead_is_killed_and_replaced(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    workers, replacements = make(2)
    told(replacements, "incarnation/1/0", "0")
    assert not replacements.superfluous(workers)
    told(replacements, "lost/1/0")
    assert replacements.superfluous(workers) == [workers[1]]
    end(workers[1])
    assert replacements.replace(workers, stopping=False) and len(workers) == 2
    assert "said nothing any more and was taken for dead" in capfd.readouterr().err
    told(replacements, "incarnation/1/1", "1")
    assert not replacements.superfluous(workers), "its replacement is another incarnation"


def test_a_rank_that_dies_again_at_once_is_replaced_after_a_pause(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    workers, replacements = make(2, clock=clock)
    end(workers[1])
    assert replacements.replace(workers, stopping=False)
    assert len(workers) == 2, "the first time at once"
    end(workers[1])
    assert replacements.replace(workers, stopping=False)
    assert [w.rank for w in workers] == [0]
    assert "a new process takes its place in 1 s" in capfd.readouterr().err
    clock.now = 0.9
    replacements.start_due(workers)
    assert len(workers) == 1
    clock.now = 1.0
    replacements.start_due(workers)
    assert [w.rank for w in workers] == [0, 1] and replacements.starts == {1: 2}
    replacements.start_due(workers)
    assert len(workers) == 2


def test_replacements_are_counted_within_the_window_only(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    workers, replacements = make(4, respawns=1, clock=clock)
    for rank in (0, 1):
        end(next(w for w in workers if w.rank == rank))
        assert replacements.replace(workers, stopping=False)
    assert sorted(w.rank for w in workers) == [0, 2, 3]
    assert "go on without it (restarts=1 within 100 s is used up)" in capfd.readouterr().err
    clock.now = 100.0
    end(next(w for w in workers if w.rank == 2))
    assert replacements.replace(workers, stopping=False)
    assert sorted(w.rank for w in workers) == [0, 2, 3]


def test_one_that_twice_cannot_join_for_the_same_reason_is_not_started_again(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    clock, reports = Clock(), dict[int, Any]()
    workers, replacements = make(2, reports=reports, clock=clock)
    end(workers[1])
    assert replacements.replace(workers, stopping=False)
    for now in (1.0, 2.0):
        clock.now = now
        reports[1] = {**report("RuntimeError"), "time": now, "round": None}
        end(workers[1])
        assert replacements.replace(workers, stopping=False)
        clock.now += 30
        replacements.start_due(workers)
    assert [w.rank for w in workers] == [0]
    assert "rank 1 failed twice before its first round with the same" in capfd.readouterr().err


def test_a_report_of_an_earlier_process_is_not_that_of_a_killed_one(make: Make) -> None:
    reports = {1: {**report("RuntimeError"), "time": 1.0}}
    workers, replacements = make(2, reports=reports)
    replacements.starts[1] = 1  # it had not joined yet
    end(workers[1])
    assert replacements.replace(workers, stopping=False) and len(workers) == 2
    end(workers[1])
    told(replacements, "joined/1/2")
    assert replacements.replace(workers, stopping=False), "killed, not failed"


def test_in_a_run_that_is_over_nobody_waits_for_a_new_process(make: Make) -> None:
    clock = Clock()
    workers, replacements = make(2, clock=clock)
    for _ in range(2):
        end(workers[1])
        assert replacements.replace(workers, stopping=False)
    workers[0].process.kill()
    workers[0].process.wait()
    workers[0].process.returncode = 0  # it has done everything
    clock.now = 9.0
    replacements.start_due(workers)
    assert len(workers) == 1
