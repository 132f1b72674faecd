"""`manyhands trace RUN`: write a trace file for ui.perfetto.dev.

For a pipeline it also draws a picture of one step and prints the bubble.
"""

from __future__ import annotations

from pathlib import Path

from manyhands.observe import pipeline_picture
from manyhands.observe.bubble import bubble
from manyhands.observe.chrome_trace import write_trace
from manyhands.observe.events import read
from manyhands.observe.pipeline_trace import PipelineTrace, pipelines
from manyhands.split.schedules import bubble_fraction


def trace(run: Path, out: Path | None = None) -> Path:
    """Write the trace of a run, by default into its own directory; return its path.

    The picture of a pipeline is written beside it.
    """
    written = write_trace(run, out or run / "trace.json")
    said = [
        (pipeline, words)
        for pipeline in pipelines(read(run))
        if (words := describe(pipeline)) is not None
    ]
    for _, words in said:
        print(words)
    if said:
        print(pipeline_picture.draw(said, Path(run).resolve().name, written.with_suffix(".png")))
    return written


def describe(pipeline: PipelineTrace) -> str | None:
    """The measured bubble of a pipeline beside the formula, as text.

    The first step counts only if there is no other: threads, kernels and connections start in it.
    """
    first = min(e.round for e in pipeline.events)
    events = [e for e in pipeline.events if e.round > first] or list(pipeline.events)
    found = bubble(events)
    if found is None:
        return None
    p, m, v = len(pipeline.ranks), pipeline.micros, pipeline.chunks
    t_f, t_b, t_w = (pipeline.seconds(name) for name in ("forward", "backward", "weight"))
    if t_w:
        formula, schedule = "(p-1)(tF+max(0,tB-tW)) of the step", "zero_bubble"
    elif v > 1:
        formula, schedule = "(p-1)/(vm+p-1)", "interleaved"
    else:
        formula, schedule = "(p-1)/(m+p-1)", "1f1b"
    expected = (
        (p - 1) / (v * m + p - 1)
        if schedule != "zero_bubble"
        else bubble_fraction(schedule, p, m, t_f, t_b, t_w)
    )
    steps = len({e.round for e in events})
    where = f"p={p} stages" if v == 1 else f"p={p} ranks with v={v} stages each"
    return (
        f"pipeline of ranks {', '.join(map(str, pipeline.ranks))}: "
        f"bubble {found:.1%} over {steps} step{'s' * (steps > 1)}, "
        f"{formula} = {expected:.1%} with {where}, m={m} micro-batches"
    )
