"""Picture of a pipeline: one step, a lane for each rank, a numbered box for each micro-batch.

The step drawn is the one of median length, the first step left out. White is idle time, pale boxes
are the later stages of a rank; low boxes are sending and receiving. Pipelines that run at the same
time (data=2) are drawn below each other and share the time axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.core import Event
from manyhands.observe.curves import GRID, INK, MUTED
from manyhands.observe.pipeline_trace import STAGED, WORK, PipelineTrace, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    "forward": "#2563eb",
    "backward": "#059669",
    "weight": "#d97706",
    "send": "#7c3aed",
    "receive": "#db2777",
}
MOST = 8  # pipelines that are drawn
NARROW = 0.012  # of a step: a narrower box has no number
WIDTH, HEAD, FOOT, LANE = 13.0, 0.5, 0.75, 0.42  # inches


def draw(pipelines: Sequence[tuple[PipelineTrace, str]], title: str, out: Path) -> Path:
    """Draw pipelines, each with a line of text above it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = pipelines[:MOST]
    lanes = [len(p.ranks) for p, _ in shown]
    height = HEAD + FOOT + sum(LANE * n + 0.62 for n in lanes)
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    FigureCanvasAgg(figure)
    # parse_math: a name may contain dollar signs
    text: dict[str, Any] = {"parse_math": False, "va": "top", "ha": "left"}
    words = f"{title}: one step of a pipeline"
    figure.text(0.03, 1 - 0.2 / height, words, size=14, weight="bold", color=INK, **text)
    steps = [typical_step(p) for p, _ in shown]
    longest = max(_length(step) for step in steps)
    top = HEAD
    for (pipeline, words), step, n in zip(shown, steps, lanes, strict=True):
        top += 0.4
        axes = figure.add_axes((0.13, 1 - (top + LANE * n) / height, 0.84, LANE * n / height))
        figure.text(0.03, 1 - (top - 0.3) / height, words, size=9, color=MUTED, **text)
        _lanes(axes, pipeline, step, longest, last=(pipeline, words) == shown[-1])
        top += LANE * n + 0.22
    _legend(figure, steps, height)
    note = ""
    if any(p.chunks > 1 for p, _ in shown):
        note = "pale: a rank's later stages"
    elif len(pipelines) > MOST:
        note = f"{len(pipelines) - MOST} more pipelines not drawn"
    if note:
        place: dict[str, Any] = {"va": "bottom", "ha": "right"}
        figure.text(0.97, 0.22 / height, note, size=9, color=MUTED, **place)
    figure.savefig(out, dpi=140)
    return out


def _legend(figure: Figure, steps: Sequence[Sequence[Event]], height: float) -> None:
    """The colours of the events that are drawn."""
    from matplotlib.patches import Rectangle

    drawn = {e.name for step in steps for e in step}
    for i, name in enumerate(name for name in COLORS if name in drawn):
        square = Rectangle(
            (0.13 + 0.11 * i, 0.22 / height),
            0.13 / WIDTH,
            0.13 / height,
            transform=figure.transFigure,
            facecolor=COLORS[name],
        )
        figure.patches.append(square)
        words = "receive, and wait for it" if name == "receive" else name
        place: dict[str, Any] = {"va": "bottom", "ha": "left"}
        figure.text(0.143 + 0.11 * i, 0.22 / height, words, size=9, color=INK, **place)


def typical_step(pipeline: PipelineTrace) -> list[Event]:
    """The events of the step of median length.

    The first step is drawn only if there is no other: kernels and connections start in it.
    """
    steps: dict[int, list[Event]] = defaultdict(list)
    for event in pipeline.events:
        if event.name in STAGED:
            steps[event.round].append(event)
    by_length = sorted((steps[r] for r in sorted(steps)[1:] or steps), key=_length)
    return by_length[len(by_length) // 2]


def _length(step: Sequence[Event]) -> float:
    return max(e.time_s + e.seconds for e in step) - min(e.time_s for e in step)


def _lanes(
    axes: Axes, pipeline: PipelineTrace, step: Sequence[Event], longest: float, last: bool
) -> None:
    zero = min(e.time_s for e in step)
    for event in step:
        lane, work = pipeline.ranks.index(event.rank), event.name in WORK
        start, low, high = (
            (event.time_s - zero) * 1e3,
            lane + (-0.42 if work else 0.24),
            lane + 0.42,
        )
        later = number(event, "stage") != min(_stages(step, event.rank))
        shade = 0.35 if later else 0.0
        axes.broken_barh(
            [(start, event.seconds * 1e3)],
            (low, high - low),
            facecolor=COLORS[event.name],
            alpha=1 - shade,
            edgecolor="white",
            linewidth=0.4,
        )
        if work and event.seconds > NARROW * longest:
            at = start + event.seconds * 5e2
            axes.text(
                at,
                lane,
                str(number(event, "micro")),
                size=8,
                color="white",
                ha="center",
                va="center",
            )
    axes.set_xlim(0, longest * 1e3)
    axes.set_ylim(len(pipeline.ranks) - 0.5, -0.5)
    axes.set_yticks(
        range(len(pipeline.ranks)),
        [_title(rank, _stages(step, rank)) for rank in pipeline.ranks],
        size=9,
        color=INK,
    )
    axes.tick_params(length=0, labelbottom=last, labelsize=9, colors=MUTED)
    axes.tick_params(axis="y", colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    if last:
        axes.set_xlabel("milliseconds", size=9, color=MUTED, loc="right", labelpad=1)


def _title(rank: int, stages: Sequence[int]) -> str:
    return f"rank {rank}, stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _stages(step: Sequence[Event], rank: int) -> list[int]:
    return sorted({number(e, "stage") for e in step if e.rank == rank})
