"""Public functions: `train` a task, `join` a run from a loop of one's own, `load` its weights.

`train` and `join` end up in the same place: one process per rank, each with a `Trainer`. `train`
starts the processes if nobody has; under torchrun, srun or mpirun it joins those that are there.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from manyhands.assembly.evaluation.goals import RUN_VALUES
from manyhands.assembly.rank_context import Options, open_rank_context
from manyhands.assembly.tables import PREFIX, saved_readers
from manyhands.core import Plan, Result, Snapshot, Tensors
from manyhands.embedding.saved_rows import load_own_rows, load_rows
from manyhands.embedding.tables import embeddings
from manyhands.entry import (
    MakeTask,
    run_store,
    script_being_loaded,
    script_name,
    start,
    watched_file,
    with_saved_words,
    work,
)
from manyhands.errors import CheckpointError, PlanError, TaskError
from manyhands.launch import environment
from manyhands.launch.signals import Stop, refuse_present
from manyhands.own_loop import Run, opened, script_text
from manyhands.plan import arguments
from manyhands.plan import words as plan_words
from manyhands.plan.words import Words
from manyhands.recover.checkpoint import NOTHING, find, read_manifest
from manyhands.recover.table_files import TABLES
from manyhands.replica.state import load_model
from manyhands.server.snapshots.table_reader import ChangedRows, TableReader
from manyhands.task import Callback, Task, check_callbacks, check_function
from manyhands.user_traceback import trim

SEEDED = 1 << 32  # torch seeds itself with 64 random bits; people give smaller numbers


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
    argv: bool = True,
) -> Result:
    """Train a task under a plan and return how it went.

    Alone, this starts `data=` processes on this machine and waits for them (one process: it trains
    right here). Under torchrun and the like it takes part in the job that is there.

    Plan words, --resume and --dir on the script's command line win over those given here;
    `argv=False` leaves the command line alone.
    """
    if (script := script_being_loaded()) is not None:
        raise TaskError(
            f"{script} calls train() while its task() is loaded; put that call under: "
            "if __name__ == '__main__':"
        )
    check_function(task)
    check_callbacks(callbacks)
    options = Options(
        name or script_name(),
        None if directory is None else str(directory),
        resume,
        tensorboard,
        quiet,
        callbacks=tuple(callbacks),
    )
    words, options = _from_outside(plan, options, argv)
    check_callbacks(options.callbacks)
    if not options.resume:
        _warn_of_new_rows(task)
    _warn_of_seed(task, words)
    try:
        result = start(functools.partial(work, task), words, options, port)
    except Exception as e:
        if not environment.full_traceback():
            trim(e)
        raise
    _bring_back(task, result)
    if options.callbacks and result.launched and not quiet:
        print(
            "callbacks ran in the processes of the run: their objects here are as before",
            file=sys.stderr,
        )
    return result


def _warn_of_seed(task: MakeTask, words: Words) -> None:
    """Say that torch.manual_seed before train() has no effect: a run is seeded by seed=, so that N
    ranks draw the same numbers."""
    chosen = isinstance(task, Task) and task.seed
    if environment.process_info().started_by != "alone" or chosen:
        return
    if torch.initial_seed() < SEEDED and "seed" not in plan_words.overlay(words):
        print(
            f"torch was seeded with {torch.initial_seed()} before, which a run does not look at: "
            "weights, order and dropout come from seed= of the plan, or of the Task (0 by default)",
            file=sys.stderr,
        )


def _warn_of_new_rows(task: MakeTask) -> None:
    """Say that rows of a model object which was trained before are not the next run's."""
    if not isinstance(task, Task) or not isinstance(task.model, nn.Module):
        return
    rows = sorted({m.name for m in embeddings(task.model) if m.attached})
    if rows and environment.process_info().rank == 0:
        print(
            f"an earlier run has trained the model object, but the rows of {', '.join(rows)} start "
            "anew: only its parameters go into the next run; to go on with both, use resume=True",
            file=sys.stderr,
        )


def _bring_back(task: MakeTask, result: Result) -> None:
    """Load the trained weights and rows into the model object of a task, where other processes
    trained it or its rows were on servers."""
    if not isinstance(task, Task) or not isinstance(task.model, nn.Module):
        return
    here, model = environment.process_info(), task.model
    alone = here.started_by == "alone"
    elsewhere = alone and result.launched
    # a run without servers leaves the rows to its model
    rows = sorted({m.name for m in embeddings(model) if elsewhere or not m.attached})
    if not elsewhere and not rows:
        return
    if alone and result.checkpoint is not None:
        path, saved = find(Path(result.directory))
        if elsewhere:
            load_model(model, saved.params)
        if rows:
            load_own_rows(model, _rows(saved), saved_readers(path))
        return
    if elsewhere:
        said = (
            "the model object of the task is as it was before: other processes trained their own "
            "copies of it, and nothing was saved (save=off)"
        )
    else:
        said = (
            f"the model object of the task is trained, but has no rows of {', '.join(rows)}: they "
            "were on servers, "
        ) + (
            "and nothing was saved (save=off)"
            if result.checkpoint is None
            else f"and are in the checkpoint; call mh.load({result.directory!r}, model)"
        )
    if here.rank == 0:
        print(said, file=sys.stderr)


def join(
    plan: Words = "",
    *,
    directory: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    name: str | None = None,
    argv: bool = True,
) -> Run:
    """Take part in the job this process belongs to; alone, that is a world of one.

    Plan words of the launcher and of the script's command line win over those of `plan`, and so do
    --resume and --dir; `argv=False` leaves the command line alone.
    """
    here = environment.process_info()
    own = Options(
        name or script_name(),
        None if directory is None else str(directory),
        resume,
        quiet=quiet,
    )
    words, options = _from_outside(plan, own, argv)
    words, options = with_saved_words(words, options, here.size)
    parsed = plan_words.parse(words, size=here.size)
    _check(parsed)
    stop = Stop(here.started_by != "manyhands", watched_file(parsed, here))
    refuse_present(watched_file(parsed, here))
    stop.__enter__()
    store = run_store(here, parsed.timeout_s)
    return opened(open_rank_context(parsed, here, store, options), stop)


def _from_outside(plan: Words, options: Options, argv: bool) -> tuple[Words, Options]:
    """Words and options of the launcher, or of the script's command line, over the script's own."""
    here, launched = environment.process_info(), environment.words()
    options = options.overlaid(environment.options())
    if launched:
        return plan_words.overlay(plan, launched), options
    if not argv or here.started_by == "manyhands":
        return plan, options
    given = arguments.read(sys.argv[1:], script_text() or None)
    if given.notice and here.rank == 0:
        print(given.notice, file=sys.stderr)
    options = dataclasses.replace(
        options,
        resume=options.resume or given.resume,
        directory=given.directory or options.directory,
    )
    return (plan_words.overlay(plan, given.words) if given.words else plan), options


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
    them, except a model that a run has trained: its rows are its own.
    """
    path, saved = find(Path(directory), best)
    load_model(model, saved.params)
    load_rows(model, _rows(saved), saved_readers(path))
    return model


def saved_table(
    directory: str | Path, name: str, best: str | None = None, *, check: bool = False
) -> TableReader:
    """Open the rows of an `Embedding` in a run's newest checkpoint, or its best by a metric.

    `rows(ids)` finds rows by memory map: (values, found). Nothing is loaded before; `check`
    compares all files with their checksums first, which reads all of them.
    """
    return _reader(find(Path(directory), best, NOTHING, check)[0], name)


def changed_rows(directory: str | Path, name: str, since_round: int) -> ChangedRows:
    """Rows of an `Embedding` that changed between the checkpoint of a round and the newest one.

    That checkpoint must still be there, or the newest must be an increment that adds to it
    (`save_tables=incremental`).
    """
    path, saved = find(Path(directory), None, NOTHING, check=False)
    reader, round = _reader(path, name), saved.round
    layers = read_manifest(path)[TABLES][name]
    rounds = [layer["round"] for layer in layers]
    if since_round in rounds:
        at = len(rounds) - rounds[::-1].index(since_round)
        ids, values = reader.changed_rows(reader.version_of(layers[at - 1]["tag"]))
        erased = reader.erased_after(layers[at - 1]["tag"])
        return ChangedRows(round, ids, values, np.setdiff1d(erased, reader.index().ids))
    before = path.with_name(f"step-{since_round:08d}")
    if not before.is_dir():
        raise CheckpointError(
            f"the checkpoint of round {since_round} is gone, and the newest, of round {round}, "
            f"adds to rounds {', '.join(map(str, rounds))}; give one of them, or take all rows"
        )
    older = _reader(before, name)
    ids, values = reader.changed_rows(older.version)
    return ChangedRows(round, ids, values, np.setdiff1d(older.index().ids, reader.index().ids))


def _reader(checkpoint: Path, name: str) -> TableReader:
    readers = saved_readers(checkpoint)
    if name not in readers:
        there = ", ".join(readers) or "no table files"
        raise CheckpointError(
            f"checkpoint {checkpoint} has no table {name!r}; it has {there} (a run of an older "
            "version: resume it and save once)"
        )
    return readers[name]


def _rows(saved: Snapshot) -> Tensors:
    """The rows of embeddings in a checkpoint of format 2, by "<table>/<part>"."""
    return {k.removeprefix(PREFIX): v for k, v in saved.state.items() if k.startswith(PREFIX)}
