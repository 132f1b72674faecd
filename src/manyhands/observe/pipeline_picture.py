"""The picture of a pipeline: one step, a lane a rank, a box for what a stage does with a micro-batch (its number stands in the box).

Of all steps but the first the one of median length is drawn. White is idle, pale a later stage of a rank; sending and receiving
stand as narrow boxes, low in the lane. Pipelines that run beside each other (data=2) stand below each other and share the axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.core import Event
from manyhands.observe.chrome_trace import (
    STAGED,
    WORK,
    PipelineTrace,
    number,
)
from manyhands.observe.curves import GRID, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "forward": "#2563eb",
    "backward": "#059669",
    "weight": "#d97706",
    "send": "#7c3aed",
    "receive": "#db2777",
}
MOST = 8  # pipelines
NARROW = 0.012  # of a step: a box without its number


def draw(pipelines: Sequence[tuple[PipelineTrace, str]], title: str, out: Path) -> Path:
    """Each with a line of text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = pipelines[:MOST]
    lanes = [len(p.ranks) for p, _ in shown]
    width, head, foot = 13.0, 0.5, 0.75
    height = head + foot + sum(0.42 * n + 0.62 for n in lanes)
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    text: dict[str, Any] = {
        "parse_math": False,
        "va": "top",
        "ha": "left",
    }  # a name may hold dollars
    figure.text(
        0.03,
        1 - 0.2 / height,
        f"{title}: one step of a pipeline",
        size=14,
        weight="bold",
        color=INK,
        **text,
    )
    steps = [typical_step(p) for p, _ in shown]
    longest = max(_length(step) for step in steps)
    top = head
    for (pipeline, words), step, n in zip(shown, steps, lanes, strict=True):
        top += 0.4
        axes = figure.add_axes((0.13, 1 - (top + 0.42 * n) / height, 0.84, 0.42 * n / height))
        figure.text(0.03, 1 - (top - 0.3) / height, words, size=9, color=MUTED, **text)
        _lanes(axes, pipeline, step, longest, last=(pipeline, words) == shown[-1])
        top += 0.42 * n + 0.22
    for i, (name, color) in enumerate(
        c for c in COLORS.items() if any(e.name == c[0] for step in steps for e in step)
    ):
        figure.patches.append(_square(figure, 0.13 + 0.11 * i, 0.22 / height, color, height, width))
        words = "receive, and wait for it" if name == "receive" else name
        figure.text(
            0.143 + 0.11 * i, 0.22 / height, words, size=9, color=INK, va="bottom", ha="left"
        )
    if any(p.chunks > 1 for p, _ in shown):
        figure.text(
            0.97,
            0.22 / height,
            "pale: a rank's later stages",
            size=9,
            color=MUTED,
            va="bottom",
            ha="right",
        )
    elif len(pipelines) > MOST:
        figure.text(
            0.97,
            0.22 / height,
            f"{len(pipelines) - MOST} more pipelines not drawn",
            size=9,
            color=MUTED,
            va="bottom",
            ha="right",
        )
    figure.savefig(out, dpi=140)
    return out


def typical_step(pipeline: PipelineTrace) -> list[Event]:
    """The events of the step whose length is the median; the first only if there is no other, since much starts in it."""
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
        shade = (
            0.35 if number(event, "stage") != min(_stages(step, event.rank)) else 0.0
        )  # the second stage of a rank
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


def _square(figure: Any, x: float, y: float, color: str, height: float, width: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (x, y), 0.13 / width, 0.13 / height, transform=figure.transFigure, facecolor=color
    )
