"""Saved runs: evaluate a task, or predict with it, by the weights that a run has saved.

The ranks of `data=2`, `tensor=2` or `pipe=2` share the work, and nothing is written into the run's
directory: it may still be training.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from manyhands.after_training import graph_export
from manyhands.after_training.graph_export import ExportedGraph, export_graph
from manyhands.assembly.evaluation import prediction
from manyhands.assembly.evaluation.evaluator import Evaluation
from manyhands.assembly.evaluation.prediction_file import PredictionFile, check_out
from manyhands.assembly.evaluation.saved_model import (
    KEPT,
    SavedWeights,
    Which,
    check_words,
    saved_evaluation,
)
from manyhands.assembly.rank_context import Options, RankContext, open_rank_context
from manyhands.core import Plan, Result
from manyhands.embedding.tables import embeddings
from manyhands.entry import MakeTask, defines_task, load_task, run_store, start
from manyhands.errors import CheckpointError, PlanError, TaskError
from manyhands.launch import environment
from manyhands.plan import words as plan_words
from manyhands.plan.words import Words
from manyhands.recover import directory as directories
from manyhands.task import Task, build_model, resolve, seed_alike

Work = Callable[[RankContext, Evaluation], dict[str, float]]


@dataclass(frozen=True)
class ScriptTask:
    """The task() of a script, which every rank loads for itself."""

    script: str
    arguments: tuple[str, ...] = ()

    def load(self, seed: int | None) -> MakeTask:
        sys.path.insert(0, str(Path(self.script).resolve().parent))
        sys.argv = [self.script, *self.arguments]
        seed_alike(seed or 0)  # a script may draw its data while it is imported
        return load_task(self.script)

    def check(self) -> None:
        if not defines_task(Path(self.script)):
            raise TaskError(
                f"{self.script} defines no task(), and a loop of one's own keeps its data and "
                "metrics to itself; load the weights with mh.load(run, model)"
            )


def evaluate(
    task: MakeTask | ScriptTask,
    directory: str | Path,
    plan: Words = "",
    *,
    best: str | None = None,
    data: Which = "test",
) -> dict[str, float]:
    """Loss and metrics of a task by the weights of a run: the newest, or the best by a metric
    ("accuracy", "-loss"); of its test data, or of its training data."""
    return evaluated(task, SavedWeights(str(directory), best), plan, data).metrics


def evaluated(
    task: MakeTask | ScriptTask, weights: SavedWeights, plan: Words, data: Which
) -> Result:
    """As `evaluate`; the result has the checkpoint too."""
    return _started(task, weights, plan, data, _evaluate)


def predict(
    task: MakeTask | ScriptTask,
    directory: str | Path,
    out: str | Path,
    plan: Words = "",
    *,
    best: str | None = None,
    data: Which = "test",
    overwrite: bool = False,
) -> int:
    """Write the model's outputs, and the targets, of all samples to a .parquet, .csv, .npz or .pt
    file, one row for each, in the order of the data. Returns the number of rows."""
    check_out(Path(out), overwrite)
    work = functools.partial(_predict, str(Path(out).absolute()), overwrite)
    result = _started(task, SavedWeights(str(directory), best), plan, data, work)
    return int(result.metrics.get("rows", 0))


def export(
    task: MakeTask | ScriptTask,
    directory: str | Path,
    out: str | Path,
    *,
    best: str | None = None,
    part: str | None = None,
    overwrite: bool = False,
) -> ExportedGraph:
    """Write the model as a graph, .onnx or .pt2 (torch.export), which runs without its code. The
    task's training data show how it is called; `part` is a submodule, or one of several models.
    Its weights are those of the newest checkpoint, or of the best by a metric."""
    graph_export.check_out(Path(out), overwrite)
    found: list[ExportedGraph] = []

    def work(context: RankContext, evaluation: Evaluation) -> dict[str, float]:
        found.append(export_graph(Path(out), evaluation, overwrite, part))
        return {}

    words = {"device": "cpu", "precision": "fp32", "batch": 2}
    _started(task, SavedWeights(str(directory), best), words, "train", work)
    return found[0]


def _started(
    task: MakeTask | ScriptTask, weights: SavedWeights, plan: Words, data: Which, work: Work
) -> Result:
    if data not in ("test", "train"):
        raise PlanError(f"data={data!r}, but 'test' or 'train' is needed")
    path = Path(weights.run)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no run directory; give that of a run that has saved")
    given = plan_words.overlay(plan) if not isinstance(plan, Plan) else plan_words.to_dict(plan)
    check_words(given)
    saved = plan_words.overlay(directories.read_words(path))
    words = {**{k: saved[k] for k in KEPT if k in saved}, **given}
    body = functools.partial(_on_rank, task, weights, data, work)
    return start(body, words, Options("saved", quiet=True, anyway=True))


def _on_rank(
    task: MakeTask | ScriptTask,
    weights: SavedWeights,
    data: Which,
    work: Work,
    plan: Plan,
    options: Options,
) -> dict[str, Any]:
    """One rank's part; its events go to a directory that nobody keeps."""
    here, started = environment.process_info(), time.perf_counter()
    with tempfile.TemporaryDirectory() as own:
        store = run_store(here, plan.timeout_s)
        made = task.load(plan.seed) if isinstance(task, ScriptTask) else task
        built, seed = resolve(made, plan.seed)
        model = _own_model(built)
        path, saved = weights.load(model)
        kept = dataclasses.replace(options, directory=own, held=True)
        context = open_rank_context(plan, here, store, kept)
        try:
            found = work(context, saved_evaluation(context, built, model, seed, data))
        finally:
            context.close()
    seconds = time.perf_counter() - started
    result = Result("", saved.round, 0.0, seconds, 0.0, found, checkpoint=str(path))
    return dataclasses.asdict(result)


def _own_model(task: Task) -> nn.Module:
    """The task's model; where it is an object of the user's, a copy, so that it keeps its
    weights."""
    model = build_model(task)
    if not isinstance(task.model, nn.Module):
        return model
    if embeddings(model):
        raise TaskError(
            "Task.model is an object with mh.Embedding, whose rows would be replaced by those of "
            "the run; give a function that makes it: model=lambda: Net()"
        )
    return copy.deepcopy(model)


def _evaluate(context: RankContext, evaluation: Evaluation) -> dict[str, float]:
    return evaluation.evaluate()


def _predict(
    out: str, overwrite: bool, context: RankContext, evaluation: Evaluation
) -> dict[str, float]:
    if context.rank:
        prediction.predict(evaluation, lambda columns: None)
        return {}
    file = PredictionFile(Path(out), overwrite)
    try:
        prediction.predict(evaluation, file.write)
        file.finish()
    except BaseException:
        file.abandon()
        raise
    return {"rows": float(file.rows)}
