"""`manyhands evaluate FILE_OR_RUN`: loss and metrics of a task by the weights of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from manyhands.after_training.saved_runs import ScriptTask, evaluated
from manyhands.assembly.evaluation.saved_model import SavedWeights
from manyhands.errors import CheckpointError
from manyhands.launch import environment
from manyhands.recover import directory


def evaluate(
    file: Path,
    words: list[str],
    best: str | None,
    data: Any,
    run: Path | None,
    as_json: bool,
    arguments: list[str],
) -> None:
    task, weights = script_and_weights(file, best, run, arguments)
    result = evaluated(task, weights, words, data)
    if environment.process_info().rank:
        return
    if as_json:
        # JSON has no NaN
        plain = {k: v if math.isfinite(v) else None for k, v in result.metrics.items()}
        said = {"checkpoint": result.checkpoint, "round": result.rounds, "data": data}
        print(json.dumps({**said, "metrics": plain}))
        return
    width = max(map(len, ("checkpoint", *result.metrics)))
    print(f"{'checkpoint':{width}}  {result.checkpoint}")
    for name, value in result.metrics.items():
        print(f"{name:{width}}  {value:.6g}")


def script_and_weights(
    file: Path, best: str | None, run: Path | None, arguments: list[str]
) -> tuple[ScriptTask, SavedWeights]:
    """Of a file: the weights of `run`, or of its last run; of a run's directory: its script."""
    if not file.is_dir():
        given = None if run is None else str(run)
        path = directory.choose(Path("runs"), file.stem, given, resume=True)
        task = ScriptTask(str(file), tuple(arguments))
    else:
        if run is not None:
            raise CheckpointError(
                f"{file} is a run already, and --dir={run} names another; give one of them, or the "
                "file of the task with --dir"
            )
        path, (script, kept) = file, directory.read_script(file)
        if not Path(script).is_file():
            why = f"trains {script}, which is not here" if script else "does not say its script"
            raise CheckpointError(
                f"the run {file} {why}; give the file of its task: FILE --dir {file}"
            )
        task = ScriptTask(script, tuple(arguments) or kept)
    task.check()
    return task, SavedWeights(str(path), best)
