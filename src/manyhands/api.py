"""Public functions: `train` a task, `join` a run from a loop of one's own, `load` its weights.

`train` and `join` end up in the same place: one process per rank, each with a `Trainer`. `train`
starts the processes if nobody has; under torchrun, srun or mpirun it joins those that are there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from manyhands.assembly.rank_context import Options, open_rank_context
from manyhands.assembly.tables import PREFIX
from manyhands.assembly.trainer import RUN_VALUES
from manyhands.core import Plan
from manyhands.embedding.saved_rows import load_rows
from manyhands.entry import MakeTask, run_store, script_being_loaded, script_name, start, work
from manyhands.errors import PlanError, TaskError
from manyhands.launch import environment
from manyhands.launch.signals import Stop
from manyhands.own_loop import Run, opened
from manyhands.plan import words as plan_words
from manyhands.plan.words import Words
from manyhands.recover.checkpoint import pick
from manyhands.replica.state import load_model
from manyhands.task import Callback
from manyhands.train import Result


def train(
    task: MakeTask,
    plan: Words = "",
    *,
    directory: str | Path | None = None,
    resume: bool = False,
    name: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    tensorboard: bool = False,
    quiet: bool = False,
    port: int = 0,
) -> Result:
    """Train a task under a plan and return how it went.

    Alone, this starts `data=` processes on this machine and waits for them (one process: it trains
    right here). Under torchrun and the like it takes part in the job that is there.
    """
    if (script := script_being_loaded()) is not None:
        raise TaskError(
            f"{script} calls train() while its task() is loaded; put that call under: "
            "if __name__ == '__main__':"
        )
    options = Options(
        name or script_name(),
        None if directory is None else str(directory),
        resume,
        tensorboard,
        quiet,
        callbacks=tuple(callbacks),
    )
    return start(functools.partial(work, task), plan, options, port)


def join(
    plan: Words = "",
    *,
    directory: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    name: str | None = None,
) -> Run:
    """Take part in the job this process belongs to; alone, that is a world of one.

    The launcher's plan words win over those of `plan`.
    """
    here = environment.process_info()
    parsed = plan_words.parse(plan_words.overlay(plan, environment.words()), size=here.size)
    _check(parsed)
    handed: Mapping[str, Any] = json.loads(environment.options())
    own = {
        "name": name or script_name(),
        "directory": None if directory is None else str(directory),
        "resume": resume,
        "quiet": quiet,
    }
    stop = Stop(interrupt=here.started_by != "manyhands")
    stop.__enter__()
    store = run_store(here, parsed.timeout_s)
    return opened(open_rank_context(parsed, here, store, Options(**{**own, **handed})), stop)


def _check(plan: Plan) -> None:
    """Refuse words that have no effect where the loop is the user's."""
    if plan.epochs is not None or plan.steps is not None:
        raise PlanError(
            "epochs= and steps= have no effect here: in a loop of your own, the loop says when to "
            "stop"
        )
    if plan.until is not None or plan.evaluate != "epoch":
        raise PlanError(
            "until= and evaluate= have no effect here: in a loop of your own, the loop evaluates, "
            "under run.merged()"
        )
    if plan.at is not None and plan.at.name not in RUN_VALUES:
        known = ", ".join(f"at={name}:..." for name in RUN_VALUES)
        raise PlanError(
            f"at={plan.at} has no effect here: a loop of your own keeps its metrics to itself; "
            f"{known} are known"
        )


def load(directory: str | Path, model: nn.Module, best: str | None = None) -> nn.Module:
    """Load a run's newest weights, or the best by a metric ("accuracy", "-loss"), into a model.

    Rows of `Embedding` tables come too; in one process, models whose embeddings have one name share
    them.
    """
    saved = pick(Path(directory), best)
    load_model(model, saved.params)
    rows = {k.removeprefix(PREFIX): v for k, v in saved.state.items() if k.startswith(PREFIX)}
    load_rows(model, rows)
    return model
