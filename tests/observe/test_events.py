"""Events: written in the background, read back from files alone, damaged lines passed over."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import numpy as np
import pytest

from manyhands.core import Event
from manyhands.errors import ManyhandsError
from manyhands.observe.events import Recorder, read
from support.recorded_runs import record, whole_run


class Keep:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def write(self, events: list[Event]) -> None:
        self.events += events

    def close(self) -> None:
        self.closed += 1


class Full:
    """A sink on a real full device."""

    def __init__(self) -> None:
        self.tries = 0

    def write(self, events: list[Event]) -> None:
        self.tries += 1
        with open("/dev/full", "w") as file:
            file.write("x" * len(events))

    def close(self) -> None:
        raise OSError(errno.EIO, "still broken")


EVENTS = [
    Event(1.0, 0, 0, "start", value="data=2"),
    Event(2.0, 0, 1, "all_reduce", 0.25, 4096),
    Event(3.0, 0, 2, "progress", value={"loss": 0.5, "epoch": 1.0}),
    Event(4.0, 0, 3, "score", value=1.5),
]


def lines(run: Path, rank: int = 0) -> list[bytes]:
    return (run / "events" / f"rank-{rank}.jsonl").read_bytes().splitlines()


def test_what_was_emitted_reads_back_equal(tmp_path: Path) -> None:
    assert read(record(tmp_path, EVENTS)) == EVENTS


def test_nothing_is_written_before_flush_and_everything_after(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 3, [keep := Keep()])
    recorder.emit(EVENTS[0])
    assert keep.events == [] and not (tmp_path / "events").exists()
    recorder.flush()
    recorder.flush()
    assert keep.events == EVENTS[:1] and len(lines(tmp_path, 3)) == 1
    recorder.emit(EVENTS[1])
    recorder.close()
    recorder.close()
    assert keep.events == EVENTS[:2] and len(lines(tmp_path, 3)) == 2 and keep.closed == 1


def test_ranks_are_merged_by_time(tmp_path: Path) -> None:
    record(tmp_path, [Event(1.0, 0, 0, "a"), Event(3.0, 0, 0, "c")], rank=0)
    record(tmp_path, [Event(4.0, 11, 0, "d"), Event(2.0, 11, 0, "b")], rank=11)
    assert [event.name for event in read(tmp_path)] == ["a", "b", "c", "d"]


def test_a_torn_last_line_is_left_out_and_a_resumed_run_goes_on_after_it(tmp_path: Path) -> None:
    record(tmp_path, EVENTS)
    path = tmp_path / "events" / "rank-0.jsonl"
    os.truncate(path, path.stat().st_size - 9)
    assert read(tmp_path) == EVENTS[:3]
    record(tmp_path, [Event(5.0, 0, 4, "resumed")])
    assert read(tmp_path) == [*EVENTS[:3], Event(5.0, 0, 4, "resumed")]


@pytest.mark.parametrize(
    "junk", [b'{"time_s":1', b"\x00" * 64, b'{"name":"\xff\xfe', b'{"time_s":"x"}\n', b"[]\n\n"]
)
def test_junk_at_the_end_does_not_hide_what_came_before(tmp_path: Path, junk: bytes) -> None:
    record(tmp_path, EVENTS)
    with (tmp_path / "events" / "rank-0.jsonl").open("ab") as file:
        file.write(junk)
    assert read(tmp_path) == EVENTS


def test_what_is_not_finite_and_what_users_log_survives(tmp_path: Path) -> None:
    logged = {
        "nan": math.nan,
        "inf": math.inf,
        "numpy": np.float32(0.5),
        "count": 3,
        "text": "hello",
        "thing": Path("x"),
    }
    (event,) = read(record(tmp_path, [Event(1.0, 0, 0, "log", value=logged)]))  # type: ignore
    assert isinstance(event.value, dict)
    assert math.isnan(event.value.pop("nan")) and math.isnan(event.value.pop("inf"))
    assert event.value == {"numpy": 0.5, "count": 3}


def test_a_failing_sink_is_dropped_once_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, keep = Full(), Keep()
    recorder = Recorder(tmp_path, 0, [full, keep])
    for event in EVENTS:
        recorder.emit(event)
        recorder.flush()
    recorder.close()
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "Full stopped" in said
        and "No space left" in said
        and "training goes on" in said
    )
    assert full.tries == 1 and keep.events == EVENTS == read(tmp_path)


def test_a_run_directory_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events").write_text("a file where the folder should be")
    recorder = Recorder(tmp_path, 0, [keep := Keep()])
    for event in EVENTS:
        recorder.emit(event)
        recorder.flush()
    recorder.close()
    assert keep.events == EVENTS and capsys.readouterr().err.count("EventFile stopped") == 1


def test_a_full_disk_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-0.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path, 0, [keep := Keep()])
    for event in EVENTS:
        recorder.emit(event)
        recorder.flush()
    recorder.close()
    assert keep.events == EVENTS and capsys.readouterr().err.count("EventFile stopped") == 1


def test_a_file_that_grows_too_large_goes_on_without_spans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path, 0, spans_limit_bytes=200)
    for event in EVENTS * 3:
        recorder.emit(event)
        recorder.flush()
    recorder.close()
    names = [event.name for event in read(tmp_path)]
    assert names.count("all_reduce") == 1 and names.count("progress") == 3
    assert capsys.readouterr().err.count("without spans") == 1


def test_reading_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManyhandsError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(ManyhandsError, match="no run directory"):
        read(tmp_path)
    (tmp_path / "events").mkdir()
    with pytest.raises(ManyhandsError, match="holds no events"):
        read(tmp_path)


def test_a_whole_run_keeps_one_file_a_rank(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run", ranks=3)
    assert sorted(path.name for path in (run / "events").iterdir()) == [
        f"rank-{r}.jsonl" for r in range(3)
    ]
    times = [event.time_s for event in read(run)]
    assert times == sorted(times)
