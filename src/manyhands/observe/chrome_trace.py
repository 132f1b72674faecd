"""A run as one Chrome trace: open it at ui.perfetto.dev and see who computes, who waits, and for whom.

    rank 0               |round                    |round        spans nest: compute, exchange and step inside their round
                          compute  all_reduce step  compute
    rank 0 checkpoint         |checkpoint                |       what runs beside the rest gets a track of its own
    rank 0 stage 0        |forward|send|idle|receive|backward    a rank of a pipeline; idle: between its step's first and last work
    loss, samples/s       counters          notices, evaluations, checkpoints: marks on their rank's track

Times are those of each host's own clock, relative to the first event of the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from manyhands.core import Event
from manyhands.observe.events import read

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
WORK = ("forward", "backward", "weight")
STAGED = (*WORK, "send", "receive")  # of a pipeline: what a stage does with a micro-batch
NO_SPANS = ("start", "progress", "server", "log", "finish", "notice")
JITTER_US = 2.0  # two readings of the clock around the same moment differ by less than this

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

    def us(time_s: float) -> float:
        return round((time_s - zero_s) * 1e6, 3)

    yield _name("process_name", run, tid=0)
    tid = 0
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    for rank, mine in sorted(by_rank.items()):
        home = tid = tid + 1
        yield from _track(f"rank {rank}", home)
        beside = [e for e in _spans(mine) if not _staged(e)]
        for title, spans in _tracks(
            [(us(e.time_s), us(e.time_s + e.seconds), e) for e in beside]
        ).items():
            if title:
                tid += 1
                yield from _track(f"rank {rank} {title}", tid)
            where = tid if title else home
            for start, end, event in spans:
                row = {"ph": "X", "name": event.name, "cat": "span", "pid": PID, "tid": where}
                yield {**row, "ts": start, "dur": round(end - start, 3), "args": _args(event)}
        for event in mine:
            if event.name in MARKS and event.value is not None:
                ts = us(event.time_s + event.seconds)
                title = (
                    "notice"
                    if event.name == "notice"
                    else f"{event.name} done"
                    if event.seconds
                    else event.name
                )
                yield {
                    "ph": "i",
                    "name": title,
                    "cat": "mark",
                    "s": "t",
                    "pid": PID,
                    "tid": home,
                    "ts": ts,
                    "args": _args(event),
                }
            if isinstance(event.value, dict):
                for key, counter in COUNTERS.get(event.name, {}).items():
                    if math.isfinite(x := event.value.get(key, math.nan)):
                        yield {
                            "ph": "C",
                            "name": counter,
                            "pid": PID,
                            "ts": us(event.time_s),
                            "args": {counter: x},
                        }
    for pipeline in pipelines(
        events
    ):  # below all ranks: the stages of one pipeline stand under each other
        for rank in pipeline.ranks:
            tid += 1
            stages = sorted({number(e, "stage") for e in by_rank[rank] if _staged(e)})
            yield from _track(
                f"rank {rank} stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}", tid
            )
            for event in (e for e in by_rank[rank] if _staged(e)):
                row = {
                    "ph": "X",
                    "name": event.name,
                    "cat": "stage",
                    "pid": PID,
                    "tid": tid,
                    "args": _args(event),
                }
                yield {**row, "ts": us(event.time_s), "dur": round(event.seconds * 1e6, 3)}
            for round_, start, end in pipeline.idle(rank):
                row = {
                    "ph": "X",
                    "name": "idle",
                    "cat": "idle",
                    "pid": PID,
                    "tid": tid,
                    "args": {"round": round_},
                }
                yield {**row, "ts": us(start), "dur": round((end - start) * 1e6, 3)}


# -- pipelines --


@dataclass(frozen=True)
class PipelineTrace:
    """The ranks that hold one copy of a model stage by stage, and what they did in training steps."""

    ranks: tuple[int, ...]  # in the order of their first stages
    chunks: int  # stages of each rank
    events: tuple[Event, ...]

    @property
    def micros(self) -> int:
        """Of a step; of most steps, where the last batch of an epoch is smaller."""
        seen: dict[int, set[int]] = defaultdict(set)
        for event in self.events:
            seen[event.round].add(number(event, "micro"))
        counts = [len(micros) for micros in seen.values()]
        return max(counts, key=counts.count)

    def seconds(self, name: str) -> float:
        """How long one such action of one stage takes, on average."""
        lasted = [e.seconds for e in self.events if e.name == name]
        return sum(lasted) / len(lasted) if lasted else 0.0

    def idle(self, rank: int) -> Iterator[tuple[int, float, float]]:
        """(round, start, end) of the gaps in which `rank` did nothing while its pipeline was in a step."""
        rounds: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            rounds[event.round].append(event)
        for number, mine in rounds.items():
            at, end = min(e.time_s for e in mine), max(e.time_s + e.seconds for e in mine)
            busy = sorted((e.time_s, e.time_s + e.seconds) for e in mine if e.rank == rank)
            for start, stop in [*busy, (end, end)]:
                if start - at > JITTER_US * 1e-6:
                    yield number, at, start
                at = max(at, stop)


def pipelines(events: Iterable[Event]) -> list[PipelineTrace]:
    """The pipelines of a run, by what their stages did. Ranks lie on data x shard x pipe x tensor, tensor fastest, so that
    those of one pipeline are as far apart as the tensor axis is long; forward passes of evaluations are no training steps."""
    steps = _training([e for e in events if _staged(e)])
    places = {
        rank: min(number(e, "stage") for e in steps if e.rank == rank)
        for rank in sorted({e.rank for e in steps})
    }
    if not places:
        return []
    length = len(set(places.values()))
    first = next(iter(places))
    tensor = next((rank - first for rank, place in places.items() if place != places[first]), 1)
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in places:
        found[rank // (length * tensor), rank % tensor].append(rank)
    made = []
    for ranks in found.values():
        own = tuple(e for e in steps if e.rank in ranks)
        chunks = len({number(e, "stage") for e in own}) // len(ranks)
        made.append(
            PipelineTrace(tuple(sorted(ranks, key=lambda r: places[r])), max(1, chunks), own)
        )
    return made


def _training(events: list[Event]) -> list[Event]:
    """Without forward passes after which nobody went back."""
    by_step: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: e.time_s):
        by_step[event.rank, event.round].append(event)
    kept = []
    for mine in by_step.values():
        stop = max(
            (i + 1 for i, e in enumerate(mine) if e.name in ("backward", "weight")), default=0
        )
        if 0 < stop < len(mine) and mine[stop].name == "send":  # the gradients of the last way back
            stop += 1
        kept += mine[:stop]
    return kept


def _staged(event: Event) -> bool:
    return event.name in STAGED and isinstance(event.value, dict) and "stage" in event.value


def number(event: Event, key: str) -> int:
    return int(event.value.get(key, 0)) if isinstance(event.value, dict) else 0


# -- tracks of what nests --


Span = tuple[float, float, Event]  # start and end in microseconds


def _spans(events: list[Event]) -> list[Event]:
    """What lasted. Rank 0 may report an evaluation twice, as a span and with its result: one of them is enough."""
    timed = {event.name for event in events if event.seconds > 0 and event.value is None}
    lasted = [event for event in events if event.seconds > 0 and event.name not in NO_SPANS]
    return [event for event in lasted if event.value is None or event.name not in timed]


def _tracks(spans: list[Span]) -> dict[str, list[Span]]:
    """Spans by track, "" being the rank's own. Spans of one track must nest or viewers draw nonsense, and what overlaps
    (an all-reduce under the backward pass, a checkpoint written beside training) does not; it moves out, all of its name."""
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
    for (
        name,
        rest,
    ) in waiting.items():  # several of one name may be under way at once: buckets of one gradient
        lane = 1
        while rest:
            tracks[name if lane == 1 else f"{name} {lane}"], rest = _nest(rest)
            lane += 1
    return tracks


def _nest(spans: list[Span]) -> tuple[list[Span], list[Span]]:
    """Those that lie inside or after each other, trimmed by the clock's jitter; and those that do not."""
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
