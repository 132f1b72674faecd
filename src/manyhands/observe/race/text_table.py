"""Table of a race: the same rows on the terminal and on the page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from manyhands.core import Goal
from manyhands.observe.race.results import (
    Entry,
    Race,
    RunResult,
    best,
    say_target,
)
from manyhands.observe.text import number, size, took

if TYPE_CHECKING:
    from rich.table import Table

RANGES = 170  # columns of a terminal that shows the range of all numbers, not only of times


@dataclass(frozen=True)
class Column:
    """Column of the table."""

    title: str
    hint: str  # its definition, for the page
    room: int = 0  # columns that a terminal needs to show it


def columns(race: Race) -> list[Column]:
    found = [
        Column("", "position"),
        Column("plan", "what it differs in from the others"),
        Column(
            f"time to {say_target(race.target)}",
            "seconds of training until the evaluation that reached it",
        ),
        Column("vs ddp", "how many times sooner than DDP"),
        Column("epochs", "to the target"),
        Column("samples", "to the target, over all ranks", room=104),
        Column("sent/rank", "bytes that one rank sent until the end of the run"),
        Column("sent", "bytes that all ranks sent", room=136),
        Column("waiting", "share of training that ranks waited in exchanges"),
        Column(race.target.name, "of the last evaluation"),
        Column("samples/s", "over all ranks, without evaluations", room=104),
        Column("start-up", "from the command to the first step, not in the time", room=136),
    ]
    return found if race.ddp is not None else [c for c in found if c.title != "vs ddp"]


def rows(race: Race) -> list[list[str]]:
    """One row for each plan, a cell for every column; a dash where there is no number."""
    found = []
    for position, entry in enumerate(race.entries, 1):
        cells = [
            str(position) if entry.num_reached else "",
            entry.label,
            reach(entry, race.target),
            _times(race.ratio(entry)),
            _spread(entry.reaching(lambda p: p.epoch), _epochs),
            _spread(entry.reaching(lambda p: p.samples), _count),
            _spread(entry.of(lambda c: c.sent_bytes), lambda x: size(round(x))),
            _spread(entry.of(lambda c: c.sent_bytes * c.ranks), lambda x: size(round(x))),
            _spread(entry.of(lambda c: c.wait_share), lambda x: f"{x:.0%}"),
            _spread(entry.of(lambda c: c.final), number),
            _spread(entry.of(lambda c: c.samples_per_s), lambda x: f"{x:,.0f}"),
            _spread(entry.of(lambda c: c.start_up_s), took),
        ]
        found.append(cells if race.ddp is not None else cells[:3] + cells[4:])
    return found


def reach(entry: Entry, target: Goal) -> str:
    """When the target was reached and in how many runs, or the best value, or "failed"."""
    if not entry.runs:
        return "not run yet"
    if not entry.ran:
        return "failed"
    some = (
        ""
        if entry.num_reached == len(entry.runs)
        else f" ({entry.num_reached} of {len(entry.runs)})"
    )
    if math.isfinite(entry.time_s):
        return _spread(entry.reaching(lambda p: p.seconds), seconds, middle=entry.time_s) + some
    closest = number(best(target, entry.of(lambda c: c.best)))
    return f"not reached{some if entry.num_reached else ''}, best {closest}"


def failures(race: Race) -> list[tuple[str, RunResult]]:
    return [(entry.label, result) for entry in race.entries for result in entry.failed]


def table(race: Race, width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = [i for i, c in enumerate(columns(race)) if width >= c.room]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for i in shown:
        title = columns(race)[i].title.replace("time to ", "time to\n")
        made.add_column(
            title,
            justify="left" if i < 2 else "right",
            vertical="top",
            overflow="fold",
            no_wrap=i != 1,
            min_width=(16 if width >= 90 else 12) if i == 1 else None,
        )
    for entry, cells in zip(race.entries, rows(race), strict=True):
        style = (
            "red"
            if not entry.ran
            else "yellow"
            if not entry.num_reached
            else "bold green"
            if entry is race.entries[0]
            else ""
        )
        row = []
        for i in shown:
            middle, bracket, ends = cells[i].partition(" [") if i > 1 else (cells[i], "", "")
            text = Text(
                middle.replace(", best", "\nbest"),
                style=style if i == 2 else "bold" if i == 1 else "",
            )
            if bracket and (i == 2 or width >= RANGES):
                text.append(f"\n{ends.replace(']', '')}", style="dim")
            row.append(text)
        made.add_row(*row)
    return made


def verdict(race: Race) -> str:
    """The race in one sentence."""
    first = race.entries[0]
    if not first.num_reached or not math.isfinite(first.time_s):
        return f"no plan reached {say_target(race.target)}"
    said = f"{first.label} reached {say_target(race.target)} first, after {seconds(first.time_s)}"
    ratio = race.ratio(first)
    if first.is_ddp and len(race.entries) > 1 and math.isfinite(race.entries[1].time_s):
        ahead = race.entries[1].time_s / first.time_s
        return f"{said}: {ahead:.2f} times sooner than {race.entries[1].label}"
    return (
        f"{said}: {ratio:.2f} times sooner than {race.ddp.label}"
        if race.ddp and math.isfinite(ratio)
        else said
    )


def seconds(x: float) -> str:
    """12.3 s, 912.3 s, 1,200 s: seconds also for long times, because times are compared."""
    return f"{x:.2f} s" if x < 10 else f"{x:.1f} s" if x < 1000 else f"{x:,.0f} s"


def _spread(values: list[float], say: object, middle: float | None = None) -> str:
    """The median, and the range where runs differ."""
    assert callable(say)
    if not values:
        return "–"
    text = str(say(median(values) if middle is None else middle))
    low, high = str(say(min(values))), str(say(max(values)))
    return text if low == high else f"{text} [{_without_unit(low)}–{_without_unit(high)}]"


def _without_unit(text: str) -> str:
    return text.removesuffix(" s")


def _epochs(x: float) -> str:
    return f"{x:.2f}".removesuffix("0").removesuffix(".0")


def _count(x: float) -> str:
    return f"{x:,.0f}" if x < 1e5 else f"{x / 1e3:,.0f}k" if x < 1e7 else f"{x / 1e6:,.1f}M"


def _times(x: float) -> str:
    return f"{x:.2f}x" if math.isfinite(x) else "–"
