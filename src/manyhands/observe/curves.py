"""Picture of the learning curves of a run, drawn from its event files alone.

A run that crashed or is still running can be drawn, too.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from manyhands.core import Event
from manyhands.observe.events import read
from manyhands.observe.text import measures, number, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, LOSS, ALARM = "#111827", "#6b7280", "#e5e7eb", "#2563eb", "#dc2626"
METRICS = ("#059669", "#d97706", "#7c3aed", "#db2777", "#0891b2", "#65a30d")
SMOOTH = 1 / 20  # share of the points: half the window that the strong line averages over

Points = list[tuple[float, float]]  # (epoch, value), by epoch


@dataclass
class Curves:
    """Curves: the numbers that the picture shows."""

    plan: str = ""
    x: str = "epoch"  # or step
    loss: Points = field(default_factory=list)
    metrics: dict[str, Points] = field(default_factory=dict)
    samples_per_s: list[float] = field(default_factory=list)
    exchange_share: list[float] = field(default_factory=list)
    rows_per_s: list[float] = field(default_factory=list)  # of the parameter servers
    staleness: list[float] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)


def draw(run_dir: Path, out: Path | None = None) -> Path:
    """Draw loss and metrics over epochs into `out`, by default `<run_dir>/curves.png`."""
    run_dir = Path(run_dir)
    out = Path(out) if out else run_dir / "curves.png"
    figure = _picture(run_dir.resolve().name, collect(read(run_dir)))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160)
    return out


def collect(events: list[Event]) -> Curves:
    curves, epoch, evaluations = Curves(), 0.0, 0
    for event in events:
        match event.name, event.value:
            case "start", str() as plan:
                curves.plan = plan
            case "progress", dict() as value:
                if "epoch" not in value and "step" in value:  # a script draws its own batches
                    curves.x, value = "step", {**value, "epoch": value["step"]}
                epoch = value.get("epoch", epoch)
                if "loss" in value:
                    _put(curves.loss, epoch, value["loss"])
                curves.samples_per_s.append(value.get("samples_per_s", math.nan))
                curves.exchange_share.append(value.get("exchange_share", math.nan))
            case "server", dict() as value:
                curves.rows_per_s.append(value.get("rows_per_s", math.nan))
                curves.staleness.append(value.get("staleness", math.nan))
            case "evaluate", dict() as value:
                evaluations += 1
                at = value.get("epoch", epoch or float(evaluations))
                curves.final = measures(value)
                for name, x in curves.final.items():
                    _put(curves.metrics.setdefault(name, []), at, x)
            case "finish", dict() as value:
                # without samples_per_s: the caption has it already
                final = {k: v for k, v in measures(value).items() if k != "samples_per_s"}
                curves.final = final or curves.final
    return curves


def _put(points: Points, epoch: float, value: float) -> None:
    # A resumed run repeats the steps after its checkpoint: they replace those of the crashed run.
    while points and points[-1][0] >= epoch:
        points.pop()
    points.append((epoch, value))


def _picture(name: str, curves: Curves) -> Figure:
    # Figure and Agg canvas by hand: pyplot keeps global state and would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

    columns = 0 if not curves.metrics else 1 if len(curves.metrics) <= 3 else 2
    rows = max(1, math.ceil(len(curves.metrics) / max(1, columns)))
    width, body = (7.2, 11.0, 14.0)[columns], max(3.5, 1.9 * rows)
    plan = textwrap.wrap(curves.plan, int(width * 11), max_lines=2, placeholder=" …")
    top, bottom = 0.95 + 0.19 * len(plan), 1.0
    height = top + body + bottom

    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    left, right = 0.75 / width, 1 - (0.95 if columns else 0.4) / width
    grid = GridSpec(
        rows,
        1 + columns,
        figure=figure,
        left=left,
        right=right,
        top=1 - top / height,
        bottom=bottom / height,
        width_ratios=[1.25 if columns == 1 else 1.4, *[1.0] * columns],
        wspace=0.3 if columns == 1 else 0.42,
        hspace=0.55,
    )

    _write_texts(figure, left - 0.35 / width, name, "\n".join(plan), _caption(curves))
    last = max(
        (points[-1][0] for points in (curves.loss, *curves.metrics.values()) if points), default=1.0
    )
    left_axes = figure.add_subplot(grid[:, 0])
    _draw_loss(left_axes, curves.loss, last)
    left_axes.xaxis.label.set_text(curves.x)
    for i, (metric, points) in enumerate(curves.metrics.items()):
        row, column = i % rows, 1 + i // rows
        lowest = row == rows - 1 or i == len(curves.metrics) - 1
        axes = figure.add_subplot(grid[row, column])
        _draw_metric(axes, metric, points, METRICS[i % len(METRICS)], last, lowest)
    return figure


def _write_texts(figure: Figure, left: float, name: str, plan: str, caption: str) -> None:
    """Name and plan above the curves, the caption below."""
    width, height = figure.get_size_inches()
    # parse_math: a name may contain dollar signs
    text: dict[str, Any] = {"ha": "left", "parse_math": False}
    small: dict[str, Any] = {"size": 9, "color": MUTED, **text}
    title = _cut(name, int(width * 6.5))
    figure.text(left, 1 - 0.2 / height, title, size=15, weight="bold", color=INK, va="top", **text)
    figure.text(left, 1 - 0.52 / height, plan, va="top", linespacing=1.4, **small)
    figure.text(left, 0.2 / height, _cut(caption, int(width * 12)), va="bottom", **small)


def _draw_loss(axes: Axes, points: Points, last: float) -> None:
    _dress(axes, "training loss", last)
    x, y = [p[0] for p in points], [p[1] for p in points]
    finite = [v for v in y if math.isfinite(v)]
    if not finite:
        words = "no finite loss was recorded" if points else "no loss was recorded"
        axes.text(
            0.5,
            0.5,
            words,
            transform=axes.transAxes,
            ha="center",
            va="center",
            color=MUTED,
            size=10,
        )
        axes.set_yticks([])
        return
    if min(finite) > 0 and max(finite) / min(finite) > 50:
        axes.set_yscale("log")
    else:
        _tidy_ticks(axes, finite)
    few = len(finite) < 12
    if few:
        axes.plot(x, y, color=LOSS, lw=2.0, marker="o", ms=5, clip_on=False)
    else:
        axes.plot(x, y, color=LOSS, lw=1.0, alpha=0.3)
        axes.plot(x, smooth(y), color=LOSS, lw=2.2, solid_capstyle="round")
    _mark_divergence(axes, x, y)


def _mark_divergence(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    if math.isfinite(y[-1]):
        return
    since = next(i for i in range(len(y), 0, -1) if i == 1 or math.isfinite(y[i - 2])) - 1
    axes.axvline(x[since], color=ALARM, lw=1, ls=(0, (3, 3)))
    side = -1 if x[since] > sum(axes.get_xlim()) / 2 else 1
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    place |= {"ha": "left" if side > 0 else "right", "va": "top"}
    axes.annotate(
        f"not finite from epoch {x[since]:.2f}",
        (x[since], 0.97),
        (5 * side, 0),
        **place,
        color=ALARM,
        size=8.5,
    )


def _draw_metric(
    axes: Axes, name: str, points: Points, color: str, last: float, lowest: bool
) -> None:
    _dress(axes, "evaluation loss" if name == "loss" else name, last, lowest)
    finite = [p for p in points if math.isfinite(p[1])]
    if not finite:
        axes.text(
            0.5,
            0.5,
            "not finite",
            transform=axes.transAxes,
            ha="center",
            va="center",
            color=MUTED,
            size=10,
        )
        axes.set_yticks([])
        return
    axes.plot(
        [p[0] for p in points],
        [p[1] for p in points],
        color=color,
        lw=2.0,
        marker="o",
        ms=3.5 if len(points) < 40 else 0,
    )
    _tidy_ticks(axes, [p[1] for p in finite])
    x, y = finite[-1]
    axes.plot([x], [y], "o", color=color, ms=7, mec="white", mew=1.5, clip_on=False, zorder=5)
    axes.annotate(
        number(y),
        (x, y),
        (8, 0),
        textcoords="offset points",
        va="center",
        color=color,
        size=10,
        weight="bold",
    )


def _dress(axes: Axes, title: str, last: float, lowest: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(
        _cut(title, 36), loc="left", size=10.5, weight="bold", color=INK, pad=9, parse_math=False
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#9ca3af")
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0, pad=5, which="both")
    axes.set_xlim(0, last or 1.0)
    axes.margins(y=0.08)
    steps = [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=steps, integer=last >= 3))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=steps))
    axes.ticklabel_format(axis="y", useOffset=False)
    if lowest:
        axes.set_xlabel("epoch", size=9, color=MUTED, labelpad=5)


def _tidy_ticks(axes: Axes, values: Sequence[float]) -> None:
    if not 1e-3 <= max(map(abs, values)) < 1e6:
        # otherwise a common factor is written over the title
        axes.yaxis.set_major_formatter("{x:g}")


def smooth(y: Sequence[float]) -> list[float]:
    """Local linear regression: a line fitted around every point with a bell of weights.

        s_m = sum_k bell_k k^m        t_m = sum_k bell_k k^m y_k
        value at k = 0:  (s_2 t_0 - s_1 t_1) / (s_0 s_2 - s_1^2)

    The bell covers `SMOOTH` of all points to each side; points that are not finite have weight 0.
    A plain average would lag at both ends, where only one side is known, and start well below the
    first losses.
    """
    import numpy as np

    if len(y) < 3:
        return list(y)
    values = np.asarray(y, dtype=np.float64)
    half = max(1, min((len(values) - 1) // 2, round(len(values) * SMOOTH)))
    k = np.arange(half, -half - 1, -1.0)  # falling: convolution runs backwards
    bell = np.exp(-0.5 * (2.5 * k / half) ** 2)
    known = np.isfinite(values)
    ones, filled = known.astype(np.float64), np.where(known, values, 0.0)
    s0, s1, s2 = (np.convolve(ones, bell * k**m, "same") for m in (0, 1, 2))
    t0, t1 = (np.convolve(filled, bell * k**m, "same") for m in (0, 1))
    det = s0 * s2 - s1 * s1
    # a point without neighbours keeps its value
    fitted = np.divide(s2 * t0 - s1 * t1, det, out=filled.copy(), where=known & (det > 1e-9))
    return [float(v) for v in np.where(known, fitted, np.nan)]


def _caption(curves: Curves) -> str:
    rates = [x for x in curves.samples_per_s if math.isfinite(x)]
    shares = [x for x in curves.exchange_share if math.isfinite(x)]
    parts = [f"{median(rates):,.0f} samples/s"] if rates else []
    parts += [f"exchange {median(shares):.0%}"] if shares else []
    served = {
        k: [x for x in v if math.isfinite(x)]
        for k, v in vars(curves).items()
        if k in ("rows_per_s", "staleness")
    }
    parts += [f"{rate(median(served['rows_per_s']))} rows/s"] if any(served["rows_per_s"]) else []
    parts += [f"staleness {median(served['staleness']):.1f}"] if any(served["staleness"]) else []
    parts += [f"final {name} {number(x)}" for name, x in list(curves.final.items())[:4]]
    return "   ·   ".join(parts)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 2].rstrip(" ·") + " …"
