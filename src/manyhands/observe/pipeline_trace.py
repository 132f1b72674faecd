"""Pipeline traces: which ranks form a pipeline, and what their stages did, from events alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from manyhands.core import Event

WORK = ("forward", "backward", "weight")
STAGED = (*WORK, "send", "receive")  # what a stage does with a micro-batch
JITTER_S = 2e-6  # two readings of the clock at the same moment differ by less than this


@dataclass(frozen=True)
class PipelineTrace:
    """Pipeline trace: the ranks of one pipeline and their events in training steps."""

    ranks: tuple[int, ...]  # in the order of their first stages
    chunks: int  # stages of each rank
    events: tuple[Event, ...]

    @property
    def micros(self) -> int:
        """Micro-batches of most steps: the last batch of an epoch may have fewer."""
        seen: dict[int, set[int]] = defaultdict(set)
        for event in self.events:
            seen[event.round].add(number(event, "micro"))
        counts = [len(micros) for micros in seen.values()]
        return max(counts, key=counts.count)

    def seconds(self, name: str) -> float:
        """Mean seconds of the events of one name, such as forward."""
        lasted = [e.seconds for e in self.events if e.name == name]
        return sum(lasted) / len(lasted) if lasted else 0.0

    def idle(self, rank: int) -> Iterator[tuple[int, float, float]]:
        """(round, start, end) of the gaps in which `rank` was idle during a step."""
        rounds: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            rounds[event.round].append(event)
        for number, mine in rounds.items():
            at, end = min(e.time_s for e in mine), max(e.time_s + e.seconds for e in mine)
            busy = sorted((e.time_s, e.time_s + e.seconds) for e in mine if e.rank == rank)
            for start, stop in [*busy, (end, end)]:
                if start - at > JITTER_S:
                    yield number, at, start
                at = max(at, stop)


def pipelines(events: Iterable[Event]) -> list[PipelineTrace]:
    """The pipelines of a run, found from the stages that each rank reports.

    The layout is data x shard x pipe x tensor with tensor innermost, so the ranks of one pipeline
    differ by multiples of the tensor size. Forward passes of evaluations are left out.
    """
    steps = _training([e for e in events if is_stage_event(e)])
    first_stages = {
        rank: min(number(e, "stage") for e in steps if e.rank == rank)
        for rank in sorted({e.rank for e in steps})
    }
    if not first_stages:
        return []
    length = len(set(first_stages.values()))
    first = next(iter(first_stages))
    tensor = next(
        (rank - first for rank, stage in first_stages.items() if stage != first_stages[first]), 1
    )
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in first_stages:
        found[rank // (length * tensor), rank % tensor].append(rank)
    made = []
    for ranks in found.values():
        own = tuple(e for e in steps if e.rank in ranks)
        chunks = len({number(e, "stage") for e in own}) // len(ranks)
        made.append(
            PipelineTrace(tuple(sorted(ranks, key=lambda r: first_stages[r])), max(1, chunks), own)
        )
    return made


def _training(events: list[Event]) -> list[Event]:
    """The events without forward passes that no backward pass follows."""
    by_step: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: e.time_s):
        by_step[event.rank, event.round].append(event)
    kept = []
    for mine in by_step.values():
        stop = max(
            (i + 1 for i, e in enumerate(mine) if e.name in ("backward", "weight")), default=0
        )
        # the gradients of the last backward pass
        if 0 < stop < len(mine) and mine[stop].name == "send":
            stop += 1
        kept += mine[:stop]
    return kept


def is_stage_event(event: Event) -> bool:
    return event.name in STAGED and isinstance(event.value, dict) and "stage" in event.value


def number(event: Event, key: str) -> int:
    """The integer `key` of an event: its stage, or its micro-batch."""
    return int(event.value.get(key, 0)) if isinstance(event.value, dict) else 0
