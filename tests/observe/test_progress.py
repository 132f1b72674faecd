"""Progress of a run on a terminal and as plain lines."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import re
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from manyhands.core import Event
from manyhands.observe.progress import Progress, Warnings
from manyhands.observe.text import (
    duration,
    number,
    size,
    took,
)
from support.recorded_runs import PLAN, ZERO_S, progress

START = Event(ZERO_S, 0, 0, "start", value=PLAN)
EVALUATE = Event(ZERO_S + 3, 0, 100, "evaluate", 0.8, value={"accuracy": 0.9712, "epoch": 1.0})
CHECKPOINT = Event(
    ZERO_S + 3, 0, 100, "checkpoint", 0.4, 12_300_000, value="runs/a[b]/checkpoints/1"
)
NOTICE = Event(ZERO_S + 3, 0, 100, "notice", value="2 parameters got no gradient: [bold]head.bias")
FAILED = Event(ZERO_S + 3, 0, 100, "checkpoint_failed", value="No space left on device")
FINISH = Event(ZERO_S + 41, 0, 100, "finish", value={"accuracy": 0.98})
SPANS = [
    Event(ZERO_S, 0, 1, name, 0.1)
    for name in ("round", "compute", "all_reduce", "evaluate", "checkpoint")
]


def plain(*writes: list[Event]) -> list[str]:
    stream = io.StringIO()
    shown = Progress(stream)
    for events in writes:
        shown.write(events)
    shown.close()
    return without_legend(stream.getvalue().splitlines())


def without_legend(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("legend")]


class Window:
    """A real pseudo-terminal: what is written to `stream` is read back as the terminal would get
    it.
    """

    def __init__(self, columns: int):
        self._master, self._slave = os.openpty()
        self.resize(columns)
        self.stream: TextIO = os.fdopen(self._slave, "w", encoding="utf-8")

    def resize(self, columns: int) -> None:
        termios.tcsetwinsize(self._slave, (24, columns))

    def read(self) -> str:
        self.stream.flush()
        os.set_blocking(self._master, False)
        raw = b""
        while True:
            try:
                raw += os.read(self._master, 65536)
            except BlockingIOError:
                return raw.decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Iterator[Window]:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    made = Window(120)
    yield made
    made.close()


def screen(raw: str) -> list[str]:
    """The rows a person sees in the end: each drawn over what stood there before."""
    rows = []
    for row in raw.split("\n"):
        rows.append(
            re.sub(
                r"\x1b\[[0-9;?]*[a-zA-Z]", "", row.rstrip("\r").rpartition("\r\x1b[2K")[2]
            ).rstrip()
        )
    return without_legend([row for row in rows if row])


def test_plain_lines_are_terse() -> None:
    assert plain(
        [START, *SPANS, progress(1, 1.37)], [EVALUATE, CHECKPOINT, NOTICE, FAILED], [FINISH]
    ) == [
        f"plan        {PLAN}",
        "epoch 2/10   37%  loss 0.4132  12,843 samples/s  exchange 4%  eta 0:41",
        "evaluate    accuracy 0.9712  in 0.8 s",
        "checkpoint  runs/a[b]/checkpoints/1  12.3 MB in 0.4 s",
        "notice      2 parameters got no gradient: [bold]head.bias",
        "checkpoint  failed: No space left on device",
        "done        accuracy 0.9800  in 0:41",
    ]


def test_plain_progress_comes_every_five_seconds_at_the_end_of_epochs_and_at_the_end() -> None:
    events = [progress(0.5 * i, i / 16) for i in range(1, 40)]  # 8 s an epoch
    shown = plain([], events[:17], events[17:])
    assert [line[:16] for line in shown] == [
        "epoch 1/10    6%",  # the first
        "epoch 1/10   68%",  # 5 s later
        "epoch 1/10  100%",  # an epoch ends
        "epoch 2/10   62%",
        "epoch 2/10  100%",
        "epoch 3/10   43%",  # where it stopped
    ]


def test_what_is_not_known_is_not_shown() -> None:
    nothing = {
        "samples_per_s": math.nan,
        "eta_s": math.inf,
        "exchange_share": math.nan,
        "epochs": 0.0,
    }
    assert plain([progress(1, 0.0, loss=math.nan, **nothing)]) == ["epoch 1       0%  loss nan"]
    assert plain([Event(ZERO_S, 0, 0, "progress", value={})]) == ["epoch 1       0%"]
    assert plain([Event(ZERO_S, 0, 0, "finish")]) == ["done        "]


def test_a_script_that_draws_its_own_batches_is_shown_by_steps() -> None:
    value = {"step": 1200.0, "loss": 0.5, "samples_per_s": 80.0}
    shown = plain([Event(ZERO_S, 0, 0, "progress", value=value)])
    assert shown == ["step 1,200  loss 0.5000  80 batches/s"]


def test_a_terminal_gets_one_live_line_with_the_rest_above(window: Window) -> None:
    shown = Progress(window.stream)
    shown.write([START, progress(1, 0.2)])
    shown.write([progress(2, 0.9), NOTICE])
    shown.write([progress(3, 1.37), EVALUATE, CHECKPOINT, *SPANS])
    shown.write([progress(4, 2.0), FINISH])
    shown.close()
    raw = window.read()
    assert screen(raw) == [
        f"plan        {PLAN}",
        "notice      2 parameters got no gradient: [bold]head.bias",
        "evaluate    accuracy 0.9712  in 0.8 s",
        "checkpoint  runs/a[b]/checkpoints/1  12.3 MB in 0.4 s",
        "epoch 2/10  ━━━━━━━━━━━━━━━━━━━━━━━━  100%  loss 0.4132  12,843 samples/s  exchange 4%  "
        "eta 0:41",
        "done        accuracy 0.9800  in 0:41",
    ]
    assert "\x1b[36m" in raw and raw.rindex("\x1b[?25h") > raw.rindex(
        "\x1b[?25l"
    )  # coloured, and the cursor is back


def test_the_line_loses_fields_before_it_wraps(window: Window) -> None:
    shown = Progress(window.stream)
    shown.write([progress(1, 0.37)])
    window.read()
    last = {}
    for columns in (100, 80, 60, 40, 24, 12):
        window.resize(columns)
        shown.write([progress(2, 0.37)])
        (last[columns],) = screen(window.read())
        assert len(last[columns]) <= columns
    shown.close()
    assert (
        "━" in last[100]
        and "exchange" in last[80]
        and "exchange" not in last[60]
        and "samples/s" in last[60]
    )
    assert (
        last[40] == "epoch 1/10   37%  loss 0.4132  eta 0:41"
        and last[24] == "epoch 1/10  loss 0.4132"
    )


def test_no_color_means_none(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = Progress(window.stream)
    shown.write([START, progress(1, 0.2), NOTICE, FAILED, FINISH])
    shown.close()
    assert not re.search(r"\x1b\[[0-9;]*(3[0-9]|4[0-9]|9[0-9])[0-9;]*m", window.read())


def test_a_dumb_terminal_gets_plain_lines(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    shown = Progress(window.stream)
    shown.write([progress(1, 0.2), EVALUATE])
    shown.close()
    assert "\x1b" not in (raw := window.read()) and len(screen(raw)) == 2


def test_a_pipe_stays_plain_whatever_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert all("\x1b" not in line for line in plain([START, progress(1, 0.2), NOTICE, FINISH]))


def test_prints_of_the_user_scroll_by_above(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", window.stream)
    shown = Progress(window.stream)
    shown.write([progress(1, 0.2)])
    print("hello from the task")
    shown.close()
    assert sys.stdout is window.stream
    rows = screen(window.read())
    assert rows[0] == "hello from the task" and rows[1].startswith("epoch 1/10") and len(rows) == 2


def test_output_bound_for_a_file_is_left_alone(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", file := io.StringIO())
    shown = Progress(window.stream)
    shown.write([progress(1, 0.2)])
    print("result")
    shown.close()
    assert file.getvalue() == "result\n" and "result" not in window.read()


def test_a_figure_is_explained_once_before_it_appears_and_only_then() -> None:
    stream = io.StringIO()
    shown = Progress(stream)
    alone = dataclasses.replace(progress(0, 0.1), value={"epoch": 0.1, "exchange_share": 0.0})
    shown.write([alone, progress(6, 0.5), progress(12, 0.7)])
    shown.close()
    first, legend, *rest = stream.getvalue().splitlines()
    assert "exchange" not in first
    assert legend.startswith("legend      exchange: share of the time")
    assert not any(line.startswith("legend") for line in rest)


def test_a_quiet_run_still_says_what_went_wrong() -> None:
    stream = io.StringIO()
    warning = dataclasses.replace(NOTICE, name="warning", value="the loss looks like a sum")
    Warnings(stream).write([START, NOTICE, progress(1, 0.2), warning, FAILED, FINISH])
    assert stream.getvalue().splitlines() == [
        "manyhands: the loss looks like a sum",
        "manyhands: No space left on device",
    ]


def test_numbers_read_well() -> None:
    assert [number(x) for x in (0, 0.41324, -2.5, 20.0136, 1284.51, 3.14e-5, 2.5e7, math.nan)] == [
        *("0.0000", "0.4132", "-2.5000", "20.01", "1,284.5", "3.1e-05", "2.5e+07", "nan")
    ]
    assert [duration(s) for s in (0, 41.4, 59.6, 3723, 187200, -1)] == [
        "0:00",
        "0:41",
        "1:00",
        "1:02:03",
        "2d 4h",
        "0:00",
    ]
    assert [took(s) for s in (0.008, 0.0996, 0.44, 125)] == ["8 ms", "0.1 s", "0.4 s", "2:05"]
    assert [size(b) for b in (640, 999_960, 12_300_000, 7 * 10**12)] == [
        "640 B",
        "1.0 MB",
        "12.3 MB",
        "7.0 TB",
    ]
