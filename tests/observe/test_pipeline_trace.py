"""Traces of a pipeline's stages, and the bubble of steps whose answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli.trace import describe, trace
from manyhands.core import Event, Layout
from manyhands.observe.pipeline_picture import draw, typical_step
from manyhands.observe.pipeline_trace import pipelines
from manyhands.split.schedules import simulate
from support.recorded_runs import ZERO_S, record, whole_run

NAMES = {"F": "forward", "B": "backward", "W": "weight"}
T_F, T_B, T_W = 0.002, 0.003, 0.001


def step(
    schedule: str,
    p: int,
    m: int,
    round: int,
    layout: Layout,
    chunks: int = 1,
    evaluates: bool = False,
) -> list[Event]:
    """One step of every pipeline of `layout`, a second after the one before; then perhaps a forward
    pass of an evaluation.
    """
    seconds = {"F": T_F, "B": T_B if schedule == "zero_bubble" else T_B + T_W, "W": T_W}
    seconds = {
        kind: t / chunks for kind, t in seconds.items()
    }  # a chunk is a part of what a rank holds
    start, done, found = ZERO_S + round, simulate(schedule, p, m, T_F, T_B, T_W, chunks), []
    for rank in range(layout.size):
        place = layout.coordinates(rank)["pipe"]
        for at, a in done.starts[place]:
            value: dict[str, float] = {"micro": a.micro, "stage": a.chunk * p + place}
            found.append(Event(start + at, rank, round, NAMES[a.kind], seconds[a.kind], 0, value))
        if evaluates:
            found.append(
                Event(
                    start + 0.5 + place * T_F,
                    rank,
                    round,
                    "forward",
                    T_F,
                    0,
                    {"micro": 0, "stage": place},
                )
            )
            found.append(
                Event(
                    start + 0.5 + place * T_F + T_F,
                    rank,
                    round,
                    "send",
                    T_F,
                    64,
                    {"micro": 0, "stage": place},
                )
            )
        found.append(Event(start, rank, round, "round", 0.9))
    return found


def rows(run: Path) -> dict[str, list[dict[str, Any]]]:
    found = json.loads(trace(run).read_bytes())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in found if row["name"] == "thread_name"}
    return {
        name: [row for row in found if row["ph"] == "X" and row["tid"] == tid]
        for tid, name in names.items()
    }


def a_run(run: Path, events: list[Event]) -> Path:
    for rank in sorted({e.rank for e in events}):
        record(run, [e for e in events if e.rank == rank], rank)
    return run


def test_each_stage_has_a_lane_where_work_and_idle_fill_the_step(tmp_path: Path) -> None:
    p, m = 4, 4
    lanes = rows(a_run(tmp_path, step("1f1b", p, m, 1, Layout(pipe=p))))
    assert list(lanes) == [
        *(f"rank {r}" for r in range(p)),
        *(f"rank {r} stage {r}" for r in range(p)),
    ]
    assert {row["name"] for row in lanes["rank 0"]} == {"round"}
    whole = (m + p - 1) * (T_F + T_B + T_W) * 1e6
    for r in range(p):
        lane = lanes[f"rank {r} stage {r}"]
        assert {row["name"] for row in lane} == {"forward", "backward", "idle"}
        assert sum(row["dur"] for row in lane) == pytest.approx(whole, rel=0.01)
        idle = sum(row["dur"] for row in lane if row["name"] == "idle")
        assert idle / whole == pytest.approx((p - 1) / (m + p - 1), rel=0.01)
        assert [row["args"]["micro"] for row in lane if row["name"] == "forward"] == list(range(m))
        ordered = sorted(lane, key=lambda row: row["ts"])
        for before, after in pairwise(ordered):
            assert (
                before["ts"] + before["dur"] <= after["ts"] + 1.0
            )  # a lane is one thing after the other


def test_sending_and_receiving_stand_in_the_lane_and_are_not_idle(tmp_path: Path) -> None:
    where: dict[str, float] = {"micro": 0, "stage": 0}
    next_: dict[str, float] = {"micro": 0, "stage": 1}
    events = [
        Event(ZERO_S, 0, 1, "forward", 0.1, 0, where),
        Event(ZERO_S + 0.1, 0, 1, "send", 0.05, 128, where),
        Event(ZERO_S, 1, 1, "receive", 0.15, 128, next_),
        Event(ZERO_S + 0.15, 1, 1, "forward", 0.1, 0, next_),
        Event(ZERO_S + 0.25, 1, 1, "backward", 0.2, 0, next_),
        Event(ZERO_S + 0.45, 1, 1, "send", 0.05, 128, next_),
        Event(ZERO_S + 0.4, 0, 1, "receive", 0.1, 128, where),
        Event(ZERO_S + 0.5, 0, 1, "backward", 0.2, 0, where),
    ]
    lanes = rows(a_run(tmp_path, events))
    first = {
        (row["name"], round(row["ts"] / 1e3), round(row["dur"] / 1e3))
        for row in lanes["rank 0 stage 0"]
    }
    assert first == {
        ("forward", 0, 100),
        ("send", 100, 50),
        ("idle", 150, 250),
        ("receive", 400, 100),
        ("backward", 500, 200),
    }
    assert [row["args"]["bytes"] for row in lanes["rank 1 stage 1"] if row["name"] == "send"] == [
        128
    ]
    assert ("idle", 500, 200) in {
        (row["name"], round(row["ts"] / 1e3), round(row["dur"] / 1e3))
        for row in lanes["rank 1 stage 1"]
    }


@pytest.mark.parametrize(
    "layout",
    [Layout(pipe=2), Layout(data=2, pipe=2), Layout(pipe=2, tensor=2), Layout(2, 2, 4, 2)],
    ids=str,
)
def test_ranks_are_put_together_by_pipeline(layout: Layout) -> None:
    events = step("1f1b", layout.pipe, 4, 1, layout)
    expected = {tuple(layout.peers(rank, "pipe")) for rank in range(layout.size)}
    assert {pipeline.ranks for pipeline in pipelines(events)} == expected


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("m", [2, 4, 8, 16])
def test_the_bubble_is_printed_against_the_formula(
    schedule: str, m: int, tmp_path: Path, capsys: Any
) -> None:
    p = 2
    events = [
        e
        for i in range(1, 4)
        for e in step(schedule, p, m, i, Layout(data=2, pipe=p), evaluates=i == 2)
    ]
    trace(a_run(tmp_path, events))
    share = f"{(p - 1) / (m + p - 1):.1%}"
    said = (
        f"bubble {share} over 2 steps, (p-1)/(m+p-1) = {share} with p=2 stages, m={m} micro-batches"
    )
    lines = [
        f"pipeline of ranks 0, 1: {said}",
        f"pipeline of ranks 2, 3: {said}",
        str(tmp_path / "trace.png"),
    ]
    assert capsys.readouterr().out.splitlines() == lines


def test_other_schedules_have_their_own_formula() -> None:
    p, m = 4, 8
    (zero,) = pipelines(step("zero_bubble", p, m, 1, Layout(pipe=p)))
    waits = (p - 1) * (T_F + T_B - T_W)
    share = f"{waits / (waits + m * (T_F + T_B + T_W)):.1%}"
    assert f"bubble {share} over 1 step, (p-1)(tF+max(0,tB-tW)) of the step = {share} with" in str(
        describe(zero)
    )
    (two,) = pipelines(step("interleaved", p, m, 1, Layout(pipe=p), chunks=2))
    share = f"{(p - 1) / (2 * m + p - 1):.1%}"
    assert (
        f"bubble {share} over 1 step, (p-1)/(vm+p-1) = {share} with p=4 ranks with v=2 stages each"
        in str(describe(two))
    )


def test_a_rank_with_several_stages_has_one_lane(tmp_path: Path) -> None:
    lanes = rows(a_run(tmp_path, step("interleaved", 2, 4, 1, Layout(pipe=2), chunks=2)))
    assert list(lanes)[2:] == ["rank 0 stages 0, 2", "rank 1 stages 1, 3"]


def test_forward_passes_of_an_evaluation_are_drawn_but_are_no_bubble(tmp_path: Path) -> None:
    layout = Layout(pipe=2)
    plain, evaluated = step("1f1b", 2, 4, 1, layout), step("1f1b", 2, 4, 1, layout, evaluates=True)
    assert [describe(q) for q in pipelines(plain)] == [describe(q) for q in pipelines(evaluated)]
    lanes = rows(a_run(tmp_path, evaluated))
    assert len([row for row in lanes["rank 0 stage 0"] if row["name"] == "forward"]) == 5
    assert all(row["ts"] < 0.5e6 for row in lanes["rank 0 stage 0"] if row["name"] == "idle")


def test_a_run_without_a_pipeline_prints_nothing_more(tmp_path: Path, capsys: Any) -> None:
    trace(whole_run(tmp_path))
    assert capsys.readouterr().out == ""


def test_the_picture_shows_a_typical_step_with_a_box_for_all_that_was_done(tmp_path: Path) -> None:
    slow = [
        replace(e, seconds=9 * e.seconds, time_s=ZERO_S + 9 * (e.time_s - ZERO_S))
        for e in step("1f1b", 2, 4, 0, Layout(pipe=2))
    ]
    (pipeline,) = pipelines(
        [*slow, *step("1f1b", 2, 4, 1, Layout(pipe=2)), *step("1f1b", 2, 4, 2, Layout(pipe=2))]
    )
    shown = typical_step(pipeline)
    assert {e.round for e in shown} == {2} and len(shown) == 2 * 4 * 2
    out = draw(
        [(pipeline, "what is said")] * 12, "a run that costs $5 and $6", tmp_path / "step.png"
    )
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000
