"""Restarts of a whole run: which failures, how often, from where."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from manyhands.errors import LaunchError, ServerLost
from manyhands.launch.restart_budget import RestartBudget
from manyhands.launch.restarts import Restarts

KILLED = LaunchError("rank 1 (pid 5) was killed by SIGKILL", 137, "killed")
LOST = LaunchError("rank 0 failed:\nServerLost: server 1 is gone", 2, "ServerLost", 7)


def failed(round: int, rank: int = 0, kind: str = "KeyError") -> LaunchError:
    return LaunchError(f"rank {rank} failed:\nTraceback ...\n{kind}: 'x'", 1, kind, round)


def restarts(most: int = 3, newest: str = "step-4", **options: Any) -> Restarts:
    budget = RestartBudget(most, 600.0, first_s=0.0, clock=lambda: 0.0)
    options = {"any_failure": True, "restores": False, **options}
    return Restarts(budget, lambda: newest, **options)


def attempts(errors: Iterable[Exception]) -> tuple[list[bool], Callable[[bool], dict[str, Any]]]:
    """Attempts that fail with these errors, and then succeed; and what each was given."""
    todo: Iterator[Exception] = iter(errors)
    given: list[bool] = []

    def attempt(resume: bool) -> dict[str, Any]:
        given.append(resume)
        for error in todo:
            raise error
        return {"rounds": 9}

    return given, attempt


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is a matter of the budget, which has tests of its own."""
    monkeypatch.setattr(RestartBudget, "_pause_s", lambda self, times: 0.0)


def test_a_run_whose_rank_was_killed_goes_on_from_its_last_checkpoint(
    capfd: pytest.CaptureFixture[str],
) -> None:
    given, attempt = attempts([KILLED, KILLED])
    assert restarts().run(attempt) == {"rounds": 9}
    assert given == [False, True, True]
    said = capfd.readouterr().err
    assert "was killed by SIGKILL" in said and "going on in 0 s from step-4" in said


def test_without_a_checkpoint_it_starts_from_the_beginning_and_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    _, attempt = attempts([KILLED])
    restarts(newest="").run(attempt)
    assert "from the beginning: there is no checkpoint yet" in capfd.readouterr().err


def test_when_the_budget_is_used_up_the_last_failure_is_that_of_the_run() -> None:
    _, attempt = attempts([KILLED] * 4)
    with pytest.raises(LaunchError, match=r"SIGKILL\nrestarts=3 within 600 s is used up") as e:
        restarts().run(attempt)
    assert e.value.exit_code == 137


def test_the_same_error_at_the_same_round_ends_the_run_whichever_rank_reports_it() -> None:
    given, attempt = attempts([failed(120), failed(120, rank=1), failed(120)])
    with pytest.raises(LaunchError, match="KeyError: 'x'\nfailed twice at round 120 with the same"):
        restarts(most=9).run(attempt)
    assert given == [False, True]


def test_the_same_error_at_another_round_may_pass() -> None:
    given, attempt = attempts([failed(120), failed(121)])
    assert restarts().run(attempt) == {"rounds": 9} and len(given) == 3


@pytest.mark.parametrize(
    "kind", ["PlanError", "TaskError", "CheckpointError", "Diverged", "RunBusy", "stopped", "late"]
)
def test_what_a_restart_cannot_cure_is_not_restarted(kind: str) -> None:
    given, attempt = attempts([failed(3, kind=kind)])
    with pytest.raises(LaunchError):
        restarts().run(attempt)
    assert given == [False]


def test_an_error_of_the_launcher_itself_is_not_restarted() -> None:
    given, attempt = attempts([LaunchError("port 5 is taken")])
    with pytest.raises(LaunchError, match="port 5"):
        restarts().run(attempt)
    assert given == [False]


def test_lost_servers_alone_are_made_up_for_by_on_loss_restore(
    capfd: pytest.CaptureFixture[str],
) -> None:
    only = {"any_failure": False, "restores": True}
    given, attempt = attempts([LOST, LOST, ServerLost("server 0 is gone")])
    assert restarts(**only).run(attempt) == {"rounds": 9} and len(given) == 4
    assert "on_loss=restore: going on" in capfd.readouterr().err
    for error, newest in ((KILLED, "step-4"), (LOST, "")):
        given, attempt = attempts([error])
        with pytest.raises(LaunchError):
            restarts(newest=newest, **only).run(attempt)
        assert given == [False]


def test_a_failure_after_somebody_asked_to_stop_is_the_last() -> None:
    def attempt(resume: bool) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        raise KILLED

    with pytest.raises(LaunchError, match=r"was killed by SIGKILL$"):
        restarts().run(attempt)


def test_a_pause_ends_with_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestartBudget, "_pause_s", lambda self, times: 1000.0)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    began = time.monotonic()
    try:
        with pytest.raises(LaunchError, match=r"stopped by SIGUSR1 before .*--resume") as e:
            restarts().run(attempts([KILLED])[1])
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert e.value.exit_code == 128 + signal.SIGUSR1 and time.monotonic() - began < 60
