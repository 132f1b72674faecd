"""Picture of convergence: objective and duality gap over seconds and rounds, of one run or several.

    bound   = the largest dual value of all runs: no objective can be below it
    excess  = objective - bound           gap = objective - the run's own dual value

Drawn from event files alone, so a run that crashed or is still running can be drawn, too. Seconds
are those of training: certificates are left out. Runs are compared that minimise the same. A dot
marks where a run converged, a cross where it ended without.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.core import Event
from manyhands.observe.curves import GRID, INK, MUTED
from manyhands.observe.events import read
from manyhands.observe.race.picture import COLORS
from manyhands.observe.text import number, size, took

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_CHARS = 26
APART = 10  # runs whose ends are this many times apart are drawn over a logarithmic axis


@dataclass(frozen=True)
class CertifiedRound:
    """A round after which objective and gap were known."""

    round: float
    seconds: float
    objective: float
    gap: float  # NaN: no dual value is known
    nbytes: float  # sent until then, by one rank


@dataclass
class Convergence:
    """Convergence of one run, from its events."""

    label: str
    words: str = ""
    about: str = ""
    rounds: list[CertifiedRound] = field(default_factory=list)
    finished: bool = False
    converged: bool = False

    @property
    def bound(self) -> float:
        """The largest dual value; -inf: none is known."""
        known = [r.objective - r.gap for r in self.rounds if math.isfinite(r.gap)]
        return max(known, default=-math.inf)


def collect(label: str, events: list[Event]) -> Convergence:
    run = Convergence(label)
    for event in events:
        match event.name, event.value:
            case "start", str() as words:
                run.words = words
            case "model", str() as about:
                run.about = about
            case "finish", dict() as value:
                run.finished, run.converged = True, bool(value.get("converged", 1.0))
            case "evaluate", dict() as value if "objective" in value:
                at = value["epoch"]
                # a resumed run repeats the rounds after its checkpoint
                while run.rounds and run.rounds[-1].round >= at:
                    run.rounds.pop()
                rest = (value["objective"], value.get("gap", math.nan), value.get("sent", 0.0))
                run.rounds.append(CertifiedRound(at, value["seconds"], *rest))
    return run


def draw(
    runs: Sequence[Path], out: Path, labels: Sequence[str] | None = None, title: str = ""
) -> Path:
    """Draw the runs of these directories into `out`; labels are their names unless given."""
    names = [Path(run).resolve().name for run in runs] if labels is None else labels
    found = [collect(name, read(Path(run))) for name, run in zip(names, runs, strict=True)]
    out.parent.mkdir(parents=True, exist_ok=True)
    figure(found, title).savefig(out, dpi=160)
    return out


def figure(runs: Sequence[Convergence], title: str = "") -> Figure:
    # Figure and Agg canvas by hand: pyplot keeps global state and would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    one = len(runs) == 1
    words = textwrap.wrap(runs[0].words, 120, max_lines=2, placeholder=" …") if one else []
    head = 0.98 + 0.19 * max(1, len(words))
    width, panel, foot = (11.0, 2.7, 0.95) if one else (13.4, 2.7, 0.65)
    side = 0.3 if one else 2.7
    height = head + 2 * panel + 0.62 + foot
    made = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(made)
    left, gap = 0.85, 0.75
    across = (width - left - side - gap) / 2
    bound = max((run.bound for run in runs), default=-math.inf)
    floor = bound if math.isfinite(bound) else _lowest(runs)
    above = "its lower bound" if math.isfinite(bound) else "the lowest seen"
    kinds: list[tuple[str, Callable[[CertifiedRound], float]]] = [
        (f"objective above {above}", lambda r: r.objective - floor),
        ("duality gap", lambda r: r.gap),
    ]
    over: list[tuple[str, Callable[[CertifiedRound], float]]] = [
        ("seconds", lambda r: r.seconds),
        ("rounds", lambda r: r.round),
    ]
    for i, (what, y) in enumerate(kinds):
        for j, (unit, x) in enumerate(over):
            bottom = foot + (1 - i) * (panel + 0.62)
            place = (left + j * (across + gap), bottom, across, panel)
            axes = made.add_axes(
                (place[0] / width, place[1] / height, place[2] / width, place[3] / height)
            )
            _panel(axes, runs, f"{what} over {unit}", unit if i else "", x, y)
    _write_texts(made, runs, words, title or (runs[0].label if one else f"{len(runs)} runs"))
    if not one:
        _legend(made, runs, 1 - (side - 0.25) / width, 1 - head / height)
    return made


def _lowest(runs: Sequence[Convergence]) -> float:
    return min((r.objective for run in runs for r in run.rounds), default=0.0)


def _panel(
    axes: Axes,
    runs: Sequence[Convergence],
    title: str,
    below: str,
    x: Callable[[CertifiedRound], float],
    y: Callable[[CertifiedRound], float],
) -> None:
    _dress(axes, title, below)
    shown = [
        (color, run, [r for r in run.rounds if math.isfinite(y(r)) and y(r) > 0])
        for color, run in zip(_colors(len(runs)), runs, strict=True)
    ]
    values = [y(r) for _, _, rounds in shown for r in rounds]
    if not values:
        axes.text(
            0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center", va="center",
            color=MUTED, size=10,
        )  # fmt: skip
        axes.set_yticks([])
        return
    if max(values) / min(values) > 10:
        axes.set_yscale("log")
    ends = [x(rounds[-1]) for _, _, rounds in shown if rounds]
    if max(ends) > APART * min(ends) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, max(ends) * 1.03 or 1.0)
    for color, run, rounds in shown:
        if not rounds:
            continue
        few = len(rounds) < 40
        axes.plot(
            [x(r) for r in rounds], [y(r) for r in rounds], color=color, lw=2.0,
            marker="o" if few else None, ms=3.2, solid_capstyle="round", zorder=3,
        )  # fmt: skip
        end = rounds[-1]
        mark = "o" if run.converged else "X"
        axes.plot(
            [x(end)], [y(end)], mark, color=color, ms=8, mec="white", mew=1.4, clip_on=False,
            zorder=5,
        )  # fmt: skip


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _dress(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", size=10.5, weight="bold", color=INK, pad=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#9ca3af")
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0, pad=5, which="both")
    if below:
        axes.set_xlabel(below, size=9, color=MUTED, labelpad=4)


def _write_texts(made: Figure, runs: Sequence[Convergence], words: list[str], title: str) -> None:
    width, height = made.get_size_inches()
    # parse_math: a name may contain dollar signs
    text: dict[str, Any] = {"ha": "left", "va": "top", "parse_math": False}
    small: dict[str, Any] = {"size": 9, "color": MUTED, **text}
    left, one = 0.4 / width, len(runs) == 1
    made.text(left, 1 - 0.2 / height, title, size=15, weight="bold", color=INK, **text)
    below = "\n".join(words) if one else runs[0].about.partition(" on ")[2].partition(";")[0]
    made.text(left, 1 - 0.53 / height, below, linespacing=1.4, **small)
    if one:
        caption = "   ·   ".join(filter(None, [runs[0].about, summary(runs[0])]))
        made.text(left, 0.36 / height, caption, **small)


def summary(run: Convergence) -> str:
    """Where a run ended, in a few words."""
    if not run.rounds:
        return "no round was certified"
    end = run.rounds[-1]
    parts = [f"{end.round:g} rounds in {took(end.seconds)}"]
    parts.append(f"gap {number(end.gap)}" if math.isfinite(end.gap) else "no bound on the gap")
    if end.nbytes:
        parts.append(f"{size(round(end.nbytes))} sent/rank")
    return ", ".join(parts)


def _legend(made: Figure, runs: Sequence[Convergence], x: float, top: float) -> None:
    from matplotlib.lines import Line2D

    width, height = made.get_size_inches()
    line, y = 0.19 / height, top
    for color, run in zip(_colors(len(runs)), runs, strict=True):
        made.add_artist(Line2D([x, x + 0.2 / width], [y - line / 2] * 2, color=color, lw=2.6))
        text: dict[str, Any] = {"va": "top", "ha": "left", "parse_math": False}
        for words in textwrap.wrap(run.label, LABEL_CHARS) or ["–"]:
            made.text(x + 0.3 / width, y, words, size=9.5, weight="bold", color=color, **text)
            y -= line
        for words in textwrap.wrap(summary(run), LABEL_CHARS + 4):
            made.text(x + 0.3 / width, y, words, size=8.5, color=MUTED, **text)
            y -= line
        y -= 0.6 * line
