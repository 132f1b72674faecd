"""Saved model: a task's model with the weights of a checkpoint, on ranks that do not train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from manyhands.assembly.data import task_data, with_task_defaults
from manyhands.assembly.evaluation.evaluator import Evaluation
from manyhands.assembly.model_parallel import divide
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.tables import PREFIX, saved_readers
from manyhands.core import Snapshot
from manyhands.embedding.saved_rows import load_rows
from manyhands.errors import PlanError, TaskError
from manyhands.recover.checkpoint import find
from manyhands.replica.state import load_model
from manyhands.task import Task

# plan words that say where and how a model is computed, not how it is trained
WORDS = (
    "batch",
    "cut",
    "data",
    "device",
    "link",
    "loaders",
    "pipe",
    "precision",
    "seed",
    "tensor",
    "threads",
    "timeout_s",
)
KEPT = ("precision", "seed")  # of the run's own words, where they are not given anew

Which = Literal["test", "train"]


@dataclass(frozen=True)
class SavedWeights:
    """The newest checkpoint of a run, or its best by a metric ("accuracy", "-loss")."""

    run: str
    best: str | None = None

    def load(self, model: nn.Module) -> tuple[Path, Snapshot]:
        """Load parameters, buffers and rows of embeddings."""
        tables = f"state/{PREFIX}"
        path, saved = find(
            Path(self.run), self.best, only=lambda name: name.startswith(("model/", tables))
        )
        load_model(model, saved.params)
        rows = {k.removeprefix(PREFIX): v for k, v in saved.state.items() if k.startswith(PREFIX)}
        load_rows(model, rows, saved_readers(path))
        return path, saved


def check_words(given: Mapping[str, Any]) -> None:
    """Refuse plan words that have no effect where nothing is trained."""
    if unknown := sorted(set(given) - set(WORDS)):
        word = unknown[0]
        why = "divides what training needs" if word in ("shard", "zero") else "is about training"
        raise PlanError(
            f"{word}={given[word]} {why} and has no effect on a saved model; "
            f"{', '.join(WORDS)} are known here"
        )


def saved_evaluation(
    context: RankContext, task: Task, model: nn.Module, seed: int, which: Which
) -> Evaluation:
    """The evaluation of a whole model, which is on its device or divided over ranks from here
    on."""
    plan = with_task_defaults(context.plan, task, seed)
    train, test = task_data(context, plan, task)
    asked = test if which == "test" else train
    if asked is None:
        raise TaskError("the task has no test data; give it test=, or ask for its training data")
    infer = None
    if context.splits_model:
        part = divide(context, plan, model, train, task)
        model = part.module
        if part.pipeline is not None:
            infer, model = part.pipeline.infer, nn.ModuleList(part.pipeline.modules)
    else:
        model.to(context.device)
    return Evaluation(context, plan, model, task, asked, infer)
