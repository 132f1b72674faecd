"""`manyhands export FILE_OR_RUN model.onnx`: the model as a graph that runs without its code."""

from __future__ import annotations

import sys
from pathlib import Path

from manyhands.after_training import graph_export, saved_runs
from manyhands.cli.evaluate import script_and_weights


def export_graph(
    file: Path,
    out: Path,
    best: str | None,
    run: Path | None,
    part: str | None,
    overwrite: bool,
    arguments: list[str],
) -> None:
    graph_export.check_out(out, overwrite)
    task, weights = script_and_weights(file, best, run, arguments)
    found = saved_runs.export(task, weights.run, out, best=best, part=part, overwrite=overwrite)
    if found.samples is not None:
        print(
            f"the graph takes batches of exactly {found.samples} samples: the model's code "
            "depends on their number",
            file=sys.stderr,
        )
    if not found.compared:
        print(
            "the file was not run: onnxruntime is not installed; the graph it was made of gives "
            "the outputs of the model",
            file=sys.stderr,
        )
    print(out)
