"""Race results: which plan reached the target, when, and at what cost, from events alone.

    seconds of an evaluation = from the start of the first training step to the start of the
                               evaluation by rank 0's clock, less the evaluations before it

The seconds and bytes of evaluations are left out for every plan. Starting processes and building
the task come before the first step and are reported apart. Bytes are the least that a rank must
send, so that merge strategies compare:

    all_reduce of n bytes on p ranks   2 n (p-1)/p
    reduce_scatter, all_gather         n (p-1)/p
    swap, transfer                     n
    push, pull                         what was pushed to servers, and what they sent to this rank
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from manyhands.core import Event, Goal
from manyhands.errors import ManyhandsError, PlanError
from manyhands.observe.events import read
from manyhands.observe.text import measures

# the share of `nbytes` that a rank sends, by the number of ranks
SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "broadcast": lambda p: 1.0,
    "barrier": lambda p: 0.0,
    "swap": lambda p: 1.0,
    "transfer": lambda p: 1.0,
    # with servers; the last three only wait
    **dict.fromkeys(("push", "pull", "tick", "deal", "flush"), lambda p: 1.0),
}


def parse_target(text: str) -> Goal:
    """`accuracy=0.88`: at least; `-loss=0.3`: at most. `loss=0.3` without a sign: at most, too."""
    name, equals, bound = text.replace(":", "=", 1).rpartition("=")
    try:
        value = float(bound)
    except ValueError:
        value = math.nan
    if not equals or not name.strip("-") or not math.isfinite(value):
        raise PlanError(
            f"--target {text}: METRIC=NUMBER is needed, "
            "such as accuracy=0.88, or -loss=0.3 for at most"
        )
    return Goal(name.lstrip("-"), value, at_most=name.startswith("-") or name == "loss")


def say_target(target: Goal) -> str:
    return f"{target.name} {'≤' if target.at_most else '≥'} {target.bound:g}"


def best(target: Goal, values: Sequence[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return (min if target.at_most else max)(known, default=math.nan)


@dataclass(frozen=True)
class Point:
    """One evaluation of a run: when it was, and the metric."""

    seconds: float
    epoch: float
    samples: float
    value: float


@dataclass
class RunResult:
    """Result of one run of one plan."""

    seed: int
    points: list[Point] = field(default_factory=list)
    reached: Point | None = None
    final: float = math.nan
    best: float = math.nan
    ranks: int = 1
    seconds: float = 0.0  # of training, all of it
    samples: float = math.nan
    start_up_s: float = math.nan
    evaluate_s: float = 0.0
    sent_bytes: float = 0.0  # by one rank, on average
    wait_share: float = 0.0
    words: str = ""  # the plan as it was resolved
    model: str = ""
    error: str = ""  # why it failed

    @property
    def time_s(self) -> float:
        return math.inf if self.reached is None else self.reached.seconds

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else math.nan


@dataclass
class Entry:
    """Entry of a race: one plan with the results of all its runs."""

    label: str
    given: str
    runs: list[RunResult] = field(default_factory=list)
    is_ddp: bool = False

    @property
    def ran(self) -> list[RunResult]:
        return [c for c in self.runs if not c.error]

    @property
    def failed(self) -> list[RunResult]:
        return [c for c in self.runs if c.error]

    @property
    def num_reached(self) -> int:
        return sum(c.reached is not None and not c.error for c in self.runs)

    @property
    def time_s(self) -> float:
        """The median time to the target; infinite for a run that did not reach it."""
        return (
            median(c.time_s if not c.error else math.inf for c in self.runs)
            if self.runs
            else math.inf
        )

    def of(self, what: Callable[[RunResult], float]) -> list[float]:
        """The number `what` of every run that has it."""
        return [v for c in self.ran if math.isfinite(v := what(c))]

    def reaching(self, what: Callable[[Point], float]) -> list[float]:
        return [
            v for c in self.ran if c.reached is not None and math.isfinite(v := what(c.reached))
        ]


@dataclass
class Race:
    """Race: all entries, the fastest first."""

    target: Goal
    entries: list[Entry]

    def __post_init__(self) -> None:
        self.entries = sorted(self.entries, key=self._order)

    def _order(self, entry: Entry) -> tuple[float, ...]:
        reached = best(self.target, entry.of(lambda c: c.best))
        distance = math.inf if math.isnan(reached) else reached if self.target.at_most else -reached
        return (entry.time_s, -entry.num_reached, distance)

    @property
    def ddp(self) -> Entry | None:
        return next(
            (e for e in self.entries if e.is_ddp), None
        )  # the fastest, if there are several

    def ratio(self, entry: Entry) -> float:
        """How many times sooner than DDP; NaN where either did not reach the target."""
        ddp = self.ddp
        if (
            ddp is None
            or not math.isfinite(entry.time_s)
            or not math.isfinite(ddp.time_s)
            or not entry.time_s
        ):
            return math.nan
        return ddp.time_s / entry.time_s

    def plain(self) -> dict[str, object]:
        """The numbers of the table as plain JSON."""
        return {
            "target": {
                "metric": self.target.name,
                "bound": self.target.bound,
                "at_most": self.target.at_most,
            },
            "plans": [self._plain(e) for e in self.entries],
        }

    def _plain(self, entry: Entry) -> dict[str, object]:
        runs = [
            {
                "seed": c.seed,
                "error": c.error or None,
                "reached": c.reached is not None,
                "time_s": _known(c.time_s),
                "epochs": _known(c.reached.epoch if c.reached else math.nan),
                "samples": _known(c.reached.samples if c.reached else math.nan),
                "ranks": c.ranks,
                "sent_bytes_per_rank": c.sent_bytes,
                "sent_bytes": c.sent_bytes * c.ranks,
                "wait_share": c.wait_share,
                "final": _known(c.final),
                "best": _known(c.best),
                "samples_per_s": _known(c.samples_per_s),
                "seconds": c.seconds,
                "start_up_s": _known(c.start_up_s),
                "evaluate_s": c.evaluate_s,
            }
            for c in entry.runs
        ]
        return {
            "label": entry.label,
            "given": entry.given,
            "words": next((c.words for c in entry.runs if c.words), ""),
            "time_s": _known(entry.time_s),
            "ratio_to_ddp": _known(self.ratio(entry)),
            "runs": runs,
        }


def _known(x: float) -> float | None:
    return x if math.isfinite(x) else None


# -- one run --


def follow(
    run: Path,
    seed: int,
    target: Goal,
    samples: int | None,
    launched_s: float = math.nan,
    error: str = "",
) -> RunResult:
    """The result of one run from its events; of a failed run, up to its failure."""
    try:
        events = read(run)
    except ManyhandsError:
        if error:
            return RunResult(seed, error=error)
        raise
    result = trace(events, seed, target, samples, launched_s)
    result.error = error
    return result


def trace(
    events: list[Event], seed: int, target: Goal, samples: int | None, launched_s: float = math.nan
) -> RunResult:
    result = RunResult(seed)
    own = [e for e in events if e.rank == 0]
    rounds = [e for e in own if e.name == "round"]
    for event in own:
        if isinstance(event.value, str) and event.name in ("start", "model"):
            setattr(result, {"start": "words"}.get(event.name, event.name), event.value)
    if not rounds:
        return result
    first_s = rounds[0].time_s
    result.ranks = 1 + max(e.rank for e in events)
    result.start_up_s = first_s - (launched_s if math.isfinite(launched_s) else events[0].time_s)
    for event in own:
        if (
            event.name != "evaluate"
            or not isinstance(event.value, dict)
            or target.name not in event.value
        ):
            continue
        epoch = event.value.get("epoch", math.nan)
        seconds = event.time_s - first_s - result.evaluate_s
        point = Point(
            seconds,
            epoch,
            math.nan if samples is None else epoch * samples,
            measures(event.value)[target.name],
        )
        result.evaluate_s += event.seconds
        result.points.append(point)
        if result.reached is None and target.reached({target.name: point.value}):
            result.reached = point
    # rounds may be missing from a file that grew too long; progress and evaluations never are
    ends = [
        e.time_s + e.seconds if e.name == "round" else e.time_s
        for e in own
        if e.name in ("round", "progress", "evaluate")
    ]
    result.seconds = max(ends) - first_s - _inside(own, max(ends))
    epochs = [e.value["epoch"] for e in own if isinstance(e.value, dict) and "epoch" in e.value]
    result.samples = max(epochs) * samples if epochs and samples is not None else math.nan
    if result.points:
        result.final = result.points[-1].value
        result.best = best(target, [p.value for p in result.points])
    _account(result, events)
    return result


def _inside(own: list[Event], until_s: float) -> float:
    """Seconds of evaluations that began before a moment."""
    return sum(
        e.seconds
        for e in own
        if e.name == "evaluate" and e.value is not None and e.time_s < until_s
    )


def _account(result: RunResult, events: list[Event]) -> None:
    """Bytes and waiting in training, over all ranks.

    A file that reached its size limit has no more spans: the rounds before are extrapolated to the
    rest. (Rounds are not counted: asynchronous ranks do different numbers of them.)
    """
    sent = waited = 0.0
    for rank in range(result.ranks):
        own = [e for e in events if e.rank == rank]
        spans = sorted((e.time_s, e.time_s + e.seconds) for e in own if e.name == "evaluate")
        starts = [s for s, _ in spans]
        # connecting comes before the first round
        first_s = min((e.time_s for e in own if e.name == "round"), default=math.inf)
        nbytes = seconds = 0.0
        for event in own:
            if event.name in SENT and event.time_s >= first_s:
                middle = event.time_s + event.seconds / 2
                i = bisect.bisect_right(starts, middle) - 1
                if i < 0 or middle >= spans[i][1]:
                    nbytes += event.nbytes * SENT[event.name](result.ranks)
                    seconds += event.seconds
        recorded = max((e.round for e in own if e.value is None), default=0)
        last = max((e.round for e in events), default=0)
        scale = last / recorded if recorded else 0.0
        sent, waited = sent + nbytes * scale, waited + seconds * scale
    result.sent_bytes = sent / result.ranks
    result.wait_share = min(1.0, waited / result.ranks / result.seconds) if result.seconds else 0.0
