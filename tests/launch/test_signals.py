"""Being told to stop is a wish that the loop reads; only a second Ctrl-C is an order."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from manyhands.errors import PlanError
from manyhands.launch import signals
from manyhands.launch.signals import Stop, refuse_present


def test_a_signal_is_remembered_and_the_old_meaning_comes_back() -> None:
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        with Stop() as stop:
            assert stop.requested == 0
            os.kill(os.getpid(), number)
            assert stop.requested == number
        assert signal.getsignal(number) == before[number]


def test_a_second_ctrl_c_interrupts_at_once_and_a_second_sigterm_does_not() -> None:
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)


def test_where_ctrl_c_is_somebody_elses_it_is_left_alone() -> None:
    with Stop(interrupt=False), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_one_inside_another_knows_what_was_asked_before_it_came() -> None:
    with Stop() as outer:
        os.kill(os.getpid(), signal.SIGTERM)
        with Stop(interrupt=False) as inner:
            assert inner.requested == signal.SIGTERM
        assert outer.requested == signal.SIGTERM


def test_the_old_meaning_comes_back_also_where_the_first_to_begin_ends_first() -> None:
    before = signal.getsignal(signal.SIGTERM)
    first, second, third = Stop(), Stop(), Stop()
    for stop in (first, second, third):
        stop.__enter__()
    for stop in (second, first):
        stop.__exit__(None, None, None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert third.requested == signal.SIGTERM
    third.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_signals_keep_their_meaning() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with Stop() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM) == before))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(0, True)]


def test_sigusr1_is_a_notice_of_preemption_as_sigterm_is() -> None:
    with Stop(interrupt=False) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested == signal.SIGUSR1 and stop.notice == "SIGUSR1"


def test_one_inside_another_hands_its_request_on_when_it_ends() -> None:
    with Stop() as outer:
        with Stop():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (outer.requested, outer.notice) == (signal.SIGUSR1, "SIGUSR1")


def test_a_file_that_appears_counts_as_sigterm_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "leave"
    monkeypatch.setattr(signals, "LOOK_S", 0.0)
    with Stop(preempt_file=str(file)) as stop:
        assert stop.requested == 0
        file.touch()
        assert stop.requested == signal.SIGTERM
        assert stop.notice == f"the file {file} (preempt_file)"


def test_the_file_is_looked_for_once_a_second_at_most(tmp_path: Path) -> None:
    file = tmp_path / "leave"
    stop = Stop(preempt_file=str(file))
    assert stop.requested == 0
    file.touch()
    assert stop.requested == 0, "the last look was a moment ago"


def test_a_file_that_is_there_already_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "leave"
    refuse_present(str(file))
    refuse_present(None)
    file.touch()
    with pytest.raises(PlanError, match=r"exists already, .* remove it, or give another path"):
        refuse_present(str(file))
