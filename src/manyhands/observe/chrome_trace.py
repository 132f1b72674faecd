"""Chrome trace of a run: open it at ui.perfetto.dev to see which rank computes and which waits.

    rank 0             |round                  |round       spans nest: compute, exchange and step
                        compute all_reduce step compute     inside their round
    rank 0 checkpoint      |checkpoint            |         overlapping spans get their own track
    rank 0 stage 0     |forward|send|idle|receive|backward  a rank of a pipeline; idle: between the
                                                            first and last work of its step
    loss, samples/s    counters
    marks              notices, evaluations, checkpoints, on the track of their rank

Times are those of each host's own clock, relative to the first event of the run.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from manyhands.core import Event
from manyhands.observe.events import read
from manyhands.observe.pipeline_trace import (
    JITTER_S,
    PipelineTrace,
    is_stage_event,
    number,
    pipelines,
)

PID = 1
COUNTERS = {
    "progress": {"loss": "loss", "samples_per_s": "samples/s", "exchange_share": "exchange share"},
    "server": {
        "rows_per_s": "server rows/s",
        "bytes_per_s": "server bytes/s",
        "queue": "server queue",
        "staleness": "staleness",
    },
}
MARKS = ("start", "evaluate", "checkpoint", "checkpoint_failed", "notice", "finish")
NO_SPANS = ("start", "progress", "server", "log", "finish", "notice")
JITTER_US = JITTER_S * 1e6

Json = dict[str, Any]


def write_trace(run_dir: Path, out: Path) -> Path:
    """Write the events of all ranks of `run_dir` as one trace file."""
    events = read(run_dir)
    rows = [*_rows(events, Path(run_dir).resolve().name)]
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.encode({"traceEvents": rows, "displayTimeUnit": "ms"}))
    return out


def _rows(events: list[Event], run: str) -> Iterator[Json]:
    zero_s = events[0].time_s
    tids = itertools.count(1)
    yield _name("process_name", run, tid=0)
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    for rank, mine in sorted(by_rank.items()):
        yield from _rank_rows(rank, mine, zero_s, tids)
    # below all ranks, so that the stages of one pipeline are next to each other
    for pipeline in pipelines(events):
        for rank in pipeline.ranks:
            staged = [e for e in by_rank[rank] if is_stage_event(e)]
            yield from _stage_rows(rank, staged, pipeline, zero_s, next(tids))


def _us(time_s: float, zero_s: float) -> float:
    return round((time_s - zero_s) * 1e6, 3)


def _rank_rows(
    rank: int, events: list[Event], zero_s: float, tids: Iterator[int]
) -> Iterator[Json]:
    """The tracks of one rank: its spans, then its marks and counters."""
    home = next(tids)
    yield from _track(f"rank {rank}", home)
    spans = [
        (_us(e.time_s, zero_s), _us(e.time_s + e.seconds, zero_s), e)
        for e in _spans(events)
        if not is_stage_event(e)
    ]
    for title, fitted in _tracks(spans).items():
        tid = next(tids) if title else home
        if title:
            yield from _track(f"rank {rank} {title}", tid)
        for start, end, event in fitted:
            row = {"ph": "X", "name": event.name, "cat": "span", "pid": PID, "tid": tid}
            yield {**row, "ts": start, "dur": round(end - start, 3), "args": _args(event)}
    for event in events:
        yield from _marks(event, zero_s, home)
        yield from _counters(event, zero_s)


def _marks(event: Event, zero_s: float, tid: int) -> Iterator[Json]:
    if event.name in MARKS and event.value is not None:
        done = event.seconds and event.name != "notice"
        yield {
            "ph": "i",
            "name": f"{event.name} done" if done else event.name,
            "cat": "mark",
            "s": "t",
            "pid": PID,
            "tid": tid,
            "ts": _us(event.time_s + event.seconds, zero_s),
            "args": _args(event),
        }


def _counters(event: Event, zero_s: float) -> Iterator[Json]:
    if isinstance(event.value, dict):
        for key, counter in COUNTERS.get(event.name, {}).items():
            if math.isfinite(x := event.value.get(key, math.nan)):
                yield {
                    "ph": "C",
                    "name": counter,
                    "pid": PID,
                    "ts": _us(event.time_s, zero_s),
                    "args": {counter: x},
                }


def _stage_rows(
    rank: int, events: list[Event], pipeline: PipelineTrace, zero_s: float, tid: int
) -> Iterator[Json]:
    """The track of one rank of a pipeline: the work of its stages, and its idle time."""
    stages = sorted({number(e, "stage") for e in events})
    title = f"rank {rank} stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
    yield from _track(title, tid)

    def row(name: str, cat: str, args: Json, start_s: float, seconds: float) -> Json:
        span = {"ts": _us(start_s, zero_s), "dur": round(seconds * 1e6, 3)}
        return {"ph": "X", "name": name, "cat": cat, "pid": PID, "tid": tid, "args": args, **span}

    for event in events:
        yield row(event.name, "stage", _args(event), event.time_s, event.seconds)
    for round_, start_s, end_s in pipeline.idle(rank):
        yield row("idle", "idle", {"round": round_}, start_s, end_s - start_s)


# -- tracks of nested spans --

Span = tuple[float, float, Event]  # start and end in microseconds


def _spans(events: list[Event]) -> list[Event]:
    """The events with a duration.

    Rank 0 may report an evaluation twice, as a span and with its result; the span is kept.
    """
    timed = {event.name for event in events if event.seconds > 0 and event.value is None}
    lasted = [event for event in events if event.seconds > 0 and event.name not in NO_SPANS]
    return [event for event in lasted if event.value is None or event.name not in timed]


def _tracks(spans: list[Span]) -> dict[str, list[Span]]:
    """Spans by track; "" is the rank's own track.

    Spans of one track must nest, or viewers draw nonsense. Spans that overlap (an all-reduce during
    the backward pass, a checkpoint written during training) do not nest: all spans of that name
    move to their own track.
    """
    spans = sorted(spans, key=lambda span: (span[0], -span[1]))
    beside: set[str] = set()
    while True:
        fitted, rest = _nest([span for span in spans if span[2].name not in beside])
        if not rest:
            break
        beside.add(rest[0][2].name)
    tracks = {"": fitted}
    waiting: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span[2].name in beside:
            waiting[span[2].name].append(span)
    # several spans of one name may overlap, too: buckets of one gradient
    for name, rest in waiting.items():
        lane = 1
        while rest:
            tracks[name if lane == 1 else f"{name} {lane}"], rest = _nest(rest)
            lane += 1
    return tracks


def _nest(spans: list[Span]) -> tuple[list[Span], list[Span]]:
    """(spans that nest or follow each other, trimmed by the clock's jitter; the others)."""
    fitted: list[Span] = []
    rest: list[Span] = []
    open_ends: list[float] = []
    closed = -math.inf
    for start, end, event in spans:
        while open_ends and open_ends[-1] <= start + JITTER_US:
            closed = open_ends.pop()
        if open_ends and end > open_ends[-1] + JITTER_US:
            rest.append((start, end, event))
            continue
        start = max(start, closed)
        end = max(start, min(end, open_ends[-1]) if open_ends else end)
        fitted.append((start, end, event))
        open_ends.append(end)
    return fitted, rest


def _track(title: str, tid: int) -> Iterator[Json]:
    yield _name("thread_name", title, tid)
    yield {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": PID,
        "tid": tid,
        "args": {"sort_index": tid},
    }


def _name(kind: str, title: str, tid: int) -> Json:
    return {"ph": "M", "name": kind, "pid": PID, "tid": tid, "args": {"name": title}}


def _args(event: Event) -> Json:
    args: Json = {"round": event.round}
    if event.nbytes:
        args["bytes"] = event.nbytes
    if event.value is not None:
        args |= event.value if isinstance(event.value, dict) else {"value": event.value}
    return args
