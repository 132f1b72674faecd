"""Picture of a race: the metric over seconds and over samples, one colour for each plan.

Thin lines are single runs, the strong one is the run of median time. A dot marks where a run
reached the target, a cross where it ended without. The left panel shows which plan is faster here,
the right one which plan learns more from a sample on any machine.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.core import Goal
from manyhands.observe.curves import GRID, INK, MUTED
from manyhands.observe.race.results import (
    Entry,
    Point,
    Race,
    RunResult,
)
from manyhands.observe.race.text_table import reach, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# colour-blind readers can tell them apart; DDP is always dark grey
COLORS = (
    "#2563eb",
    "#ea580c",
    "#059669",
    "#c026d3",
    "#ca8a04",
    "#0891b2",
    "#dc2626",
    "#7c3aed",
    "#65a30d",
    "#be185d",
)
DDP = "#374151"
LABEL_CHARS = 24


def draw(race: Race, title: str, out: Path) -> Path:
    figure(race, title).savefig(out, dpi=160)
    return out


def svg(race: Race) -> str:
    """The same without its title, for a page; text as outlines, so it looks the same everywhere."""
    import matplotlib

    made = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "race", "svg.fonttype": "path"}):
        figure(race, "").savefig(
            made,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = made.getvalue()
    # without the XML declaration and the DTD, which names another host
    return text[text.index("<svg") :]


def colors(race: Race) -> dict[int, str]:
    """Colours by entry, in the order of the table."""
    found: dict[int, str] = {}
    for entry in race.entries:
        plain = (
            DDP
            if entry.is_ddp and DDP not in found.values()
            else COLORS[sum(c != DDP for c in found.values()) % len(COLORS)]
        )
        found[id(entry)] = plain
    return found


def figure(race: Race, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    legend = [(entry, textwrap.wrap(entry.label, LABEL_CHARS) or ["–"]) for entry in race.entries]
    lines = sum(len(label) + 1.6 for _, label in legend)
    head = 0.95 if title else 0.35
    body = max(3.7, 0.19 * lines + 0.1)
    width, height = 12.6, head + body + 0.75
    made = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(made)
    left, side, gap = 0.65, 2.75, 0.62
    panel = (width - left - side - gap - 0.25) / 2
    bottom = 0.72 / height
    if title:
        text: dict[str, Any] = {"ha": "left", "va": "top", "parse_math": False}
        made.text(0.28 / width, 1 - 0.18 / height, title, size=15, weight="bold", color=INK, **text)
        made.text(0.28 / width, 1 - 0.5 / height, verdict(race), size=10, color=MUTED, **text)
    paint = colors(race)
    kinds: list[tuple[str, Callable[[Point], float]]] = [
        ("seconds of training", lambda p: p.seconds)
    ]
    by_samples = any(
        math.isfinite(p.samples) for e in race.entries for c in e.runs for p in c.points
    )
    if by_samples:
        kinds.append(("samples", lambda p: p.samples))
    else:
        kinds.append(("epochs", lambda p: p.epoch))  # a stream has no number of samples
    for i, (over, x) in enumerate(kinds):
        axes = made.add_axes(
            ((left + i * (panel + gap)) / width, bottom, panel / width, body / height)
        )
        _panel(axes, race, paint, over, x)
    _legend(
        made,
        race,
        legend,
        paint,
        x=1 - (side - 0.25) / width,
        top=bottom + body / height,
        inch=1 / height,
        char=1 / width,
    )
    return made


def _panel(
    axes: Axes, race: Race, paint: dict[int, str], over: str, x: Callable[[Point], float]
) -> None:
    _dress(axes, f"{race.target.name} over {over}", over)
    every = [p for e in race.entries for c in e.runs for p in c.points if math.isfinite(p.value)]
    if not every:
        axes.text(
            0.5,
            0.5,
            "no evaluation",
            transform=axes.transAxes,
            ha="center",
            va="center",
            color=MUTED,
            size=10,
        )
        axes.set_yticks([])
        return
    low, high = window(race)
    axes.set_ylim(low, high)
    axes.set_xlim(0, max(x(p) for p in every) * 1.03 or 1.0)
    _draw_target(axes, race.target)
    for entry in reversed(race.entries):  # the winner last, on top
        for result in entry.runs:
            bold = result is middle(entry)
            _draw_run(axes, result, x, paint[id(entry)], bold, dashed=entry.is_ddp)


def _dress(axes: Axes, title: str, over: str) -> None:
    """Title, axis, grid and ticks of a panel."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(title, loc="left", size=10.5, weight="bold", color=INK, pad=9, parse_math=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#9ca3af")
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0, pad=5, which="both")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _short(v)))
    axes.set_xlabel(over, size=9, color=MUTED, labelpad=4)


def _draw_target(axes: Axes, target: Goal) -> None:
    """A dashed line at the target, and its number."""
    axes.axhline(target.bound, color="#9ca3af", lw=1.2, ls=(0, (4, 3)), zorder=1)
    # bbox: the text covers the lines that begin there
    style: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "textcoords": "offset points",
        "size": 8,
        "color": MUTED,
        "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        "va": "top" if target.at_most else "bottom",
        "zorder": 7,
    }
    offset = (3, -4 if target.at_most else 3)
    axes.annotate(f"target {target.bound:g}", (0.0, target.bound), offset, **style)


def _draw_run(
    axes: Axes, result: RunResult, x: Callable[[Point], float], color: str, bold: bool, dashed: bool
) -> None:
    """The line of one run, and the mark at its end."""
    points = [p for p in result.points if math.isfinite(p.value)]
    if not points:
        return
    axes.plot(
        [x(p) for p in points],
        [p.value for p in points],
        color=color,
        lw=2.2 if bold else 0.9,
        alpha=1 if bold else 0.45,
        ls=(0, (5, 1.5)) if dashed else "-",
        zorder=4 if bold else 3,
        marker="o" if len(points) == 1 else None,
        ms=3,
    )
    end = result.reached or points[-1]
    axes.plot(
        [x(end)],
        [end.value],
        color=color,
        ms=8.5 if bold else 5,
        marker="o" if result.reached else "X",
        mec="white",
        mew=1.3,
        zorder=6 if bold else 5,
        clip_on=False,
    )


def window(race: Race) -> tuple[float, float]:
    """The range of the metric that is shown: near the target, without the first steps."""
    values = sorted(
        p.value for e in race.entries for c in e.runs for p in c.points if math.isfinite(p.value)
    )
    target = race.target.bound
    if race.target.at_most:
        near, far = min(values[0], target), max(target, values[int(0.8 * (len(values) - 1))])
    else:
        near, far = max(values[-1], target), min(target, values[int(0.2 * (len(values) - 1))])
    room = abs(near - far) or abs(target) * 0.1 or 1.0
    low, high = min(near, far) - 0.06 * room, max(near, far) + 0.06 * room
    return low, high


def middle(entry: Entry) -> RunResult | None:
    """The median run of a plan, by time to the target, or by its best value."""
    ran = sorted(
        entry.ran or entry.runs,
        key=lambda c: (c.time_s, -c.best if math.isfinite(c.best) else math.inf),
    )
    return ran[(len(ran) - 1) // 2] if ran else None


def _legend(
    made: Figure,
    race: Race,
    entries: list[tuple[Entry, list[str]]],
    paint: dict[int, str],
    *,
    x: float,
    top: float,
    inch: float,
    char: float,
) -> None:
    """The plans beside the panels, in the order of the table.

    Labels at the ends of the lines would overlap where lines end at the same height.
    """
    from matplotlib.lines import Line2D

    y, line = top - 0.02 * inch, 0.19 * inch
    for entry, label in entries:
        color = paint[id(entry)]
        dash = (0, (2, 0.7)) if entry.is_ddp else "-"
        made.add_artist(
            Line2D([x, x + 0.22 * char], [y - line / 2] * 2, color=color, lw=2.6, ls=dash)
        )
        for i, words in enumerate(label):
            at = (x + 0.32 * char, y - i * line)
            made.text(
                *at,
                words,
                size=9.5,
                weight="bold",
                color=color,
                va="top",
                ha="left",
                parse_math=False,
            )
        y -= len(label) * line
        made.text(
            x + 0.32 * char,
            y,
            reach(entry, race.target),
            size=9,
            color=MUTED,
            va="top",
            ha="left",
            parse_math=False,
        )
        y -= 1.6 * line


def _short(v: float) -> str:
    if v >= 1e6:
        return f"{v / 1e6:g}M"
    return f"{v / 1e3:g}k" if v >= 1e4 else f"{v:g}"
