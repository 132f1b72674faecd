"""Being told to stop is a wish that the loop reads; only a second Ctrl-C is an order."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from manyhands.launch.signals import Stop


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


def test_in_another_thread_signals_keep_their_meaning() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with Stop() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM) == before))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(0, True)]
