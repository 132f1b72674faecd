"""`manyhands predict FILE_OR_RUN --out FILE`: a model's outputs for all test samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manyhands.after_training import saved_runs
from manyhands.cli.evaluate import script_and_weights
from manyhands.errors import PlanError
from manyhands.launch import environment


def predict(
    file: Path,
    words: list[str],
    out: Path | None,
    best: str | None,
    data: Any,
    run: Path | None,
    overwrite: bool,
    arguments: list[str],
) -> None:
    if out is None:
        raise PlanError("predict needs a file to write: --out predictions.parquet")
    task, weights = script_and_weights(file, best, run, arguments)
    rows = saved_runs.predict(
        task, weights.run, out, words, best=best, data=data, overwrite=overwrite
    )
    if not environment.process_info().rank:
        print(f"{out}  {rows} rows")
