"""Chrome traces of small recorded runs: spans nest, and every rank has its lanes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli.trace import trace
from manyhands.core import Event
from manyhands.errors import ManyhandsError
from manyhands.observe.chrome_trace import write_trace
from support.recorded_runs import ZERO_S, progress, record, whole_run


def rows(run: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(trace(run, None).read_bytes(), parse_constant=refuse)["traceEvents"]


def tracks(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {row["tid"]: row["args"]["name"] for row in found if row["name"] == "thread_name"}
    return {
        name: [row for row in found if row["ph"] == "X" and row["tid"] == tid]
        for tid, name in names.items()
    }


def assert_nested(spans: list[dict[str, Any]]) -> None:
    open_ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        end = span["ts"] + span["dur"]
        while open_ends and open_ends[-1] <= span["ts"] + 1e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-3
        open_ends.append(end)


def test_every_row_is_of_the_trace_format(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    assert trace(run, None) == run / "trace.json"
    found = rows(run)
    assert {row["ph"] for row in found} == {"X", "M", "C", "i"}
    for row in found:
        assert isinstance(row["name"], str) and row["pid"] == 1
        if row["ph"] != "M":
            assert row["ts"] >= 0
        if row["ph"] == "X":
            assert row["dur"] >= 0 and isinstance(row["tid"], int) and "round" in row["args"]
        if row["ph"] == "i":
            assert row["s"] in "tpg"
        if row["ph"] == "C":
            assert all(isinstance(x, float | int) for x in row["args"].values())
    assert min(row["ts"] for row in found if row["ph"] != "M") == 0


def test_every_rank_has_a_named_track_with_nested_spans(tmp_path: Path) -> None:
    found = tracks(rows(whole_run(tmp_path / "run", ranks=3)))
    assert list(found) == ["rank 0", "rank 1", "rank 2"]
    for spans in found.values():
        assert {"round", "compute", "all_reduce", "step"} <= {span["name"] for span in spans}
        assert_nested(spans)
    first = next(span for span in found["rank 1"] if span["name"] == "all_reduce")
    assert first["ts"] == pytest.approx(310_000, abs=1) and first["dur"] == pytest.approx(
        100_000, abs=1
    )
    assert first["args"] == {"round": 0, "bytes": 4096}


def test_counters_and_marks_are_there(tmp_path: Path) -> None:
    found = rows(whole_run(tmp_path / "run", epochs=2))
    assert {row["name"] for row in found if row["ph"] == "C"} == {
        "loss",
        "samples/s",
        "exchange share",
    }
    marks = [row["name"] for row in found if row["ph"] == "i"]
    assert (
        marks.count("evaluate done") == marks.count("checkpoint done") == 2
        and marks.count("start") == 1
    )


def test_what_overlaps_gets_a_track_of_its_own(tmp_path: Path) -> None:
    """All-reduces of two buckets under the backward pass, and a checkpoint written beside the next
    rounds.
    """
    events = []
    for i in range(3):
        t = ZERO_S + i
        events += [
            Event(t, 0, i, "round", 0.9),
            Event(t, 0, i, "compute", 0.5),
            Event(t + 0.3, 0, i, "all_reduce", 0.3),
            Event(t + 0.4, 0, i, "all_reduce", 0.4),
            Event(
                t + 0.8, 0, i, "step", 0.1 + 4e-7
            ),  # the clock was read twice: ends a hair after its round
        ]
    events.append(Event(ZERO_S + 0.85, 0, 0, "checkpoint", 1.5))
    found = tracks(rows(record(tmp_path, events)))
    assert {name: {span["name"] for span in spans} for name, spans in found.items()} == {
        "rank 0": {"round", "compute", "step"},
        "rank 0 all_reduce": {"all_reduce"},
        "rank 0 all_reduce 2": {"all_reduce"},
        "rank 0 checkpoint": {"checkpoint"},
    }
    assert sum(map(len, found.values())) == len(events)
    for spans in found.values():
        assert_nested(spans)


def test_an_evaluation_told_twice_is_drawn_once(tmp_path: Path) -> None:
    value = {"accuracy": math.nan}
    found = rows(
        record(
            tmp_path,
            [Event(1.0, 0, 1, "evaluate", 0.5), Event(1.0, 0, 1, "evaluate", 0.5, value=value)],
        )
    )
    assert [row["ph"] for row in found if row["name"].startswith("evaluate")] == ["X", "i"]


def test_a_loss_that_is_not_finite_leaves_the_trace_valid(tmp_path: Path) -> None:
    found = rows(record(tmp_path, [progress(0, 0.1), progress(1, 0.2, loss=math.nan)]))
    assert [row["args"] for row in found if row["name"] == "loss"] == [{"loss": 0.4132}]


def test_the_trace_goes_where_it_is_sent(tmp_path: Path) -> None:
    out = tmp_path / "made" / "here.json"
    assert write_trace(whole_run(tmp_path / "run"), out) == out and out.stat().st_size > 1000


def test_what_is_no_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManyhandsError, match="no run directory"):
        trace(tmp_path, None)
    assert list(tmp_path.iterdir()) == []
