"""Verbs of a run: the arguments of commands about a run that trains or has trained; see `main`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.options import (
    BestBy,
    ExportedPart,
    ExportOut,
    JsonOut,
    OfScriptRun,
    Overwrite,
    PlanWords,
    PredictionOut,
    RunFolder,
    RunningRun,
    ServerNumber,
    ServersVerb,
    TaskFile,
    TaskOrRun,
    WaitForShards,
    WhichData,
)
from manyhands.cli.script_command import own
from manyhands.plan.reading import check as check_words


def servers(
    run: RunningRun,
    verb: ServersVerb = "status",
    server: ServerNumber = None,
    wait: WaitForShards = True,
) -> None:
    """Show, add or remove parameter servers of a run while it trains."""
    from manyhands.cli.servers import servers as work

    raise typer.Exit(work(run, verb, server, wait))


def scale(run: RunFolder, words: PlanWords = None) -> None:
    """Change the number of replicas of an elastic run while it trains: scale RUN data=6."""
    check_words(words or [])
    from manyhands.cli.join import scale as verb

    raise typer.Exit(verb(run, words or []))


def join(run: RunFolder, script: TaskFile = None, words: PlanWords = None) -> None:
    """Take part in an elastic run that trains, as another rank."""
    check_words(words or [])
    from manyhands.cli.join import join as verb

    raise typer.Exit(verb(run, script, words or []))


def trace(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: trace.json in the run directory.")
    ] = None,
) -> None:
    """Write one Perfetto/Chrome trace of all ranks of a run."""
    from manyhands.cli.trace import trace as verb

    print(verb(run, out))


def export(
    context: typer.Context,
    file: TaskOrRun,
    out: ExportOut = Path("model.safetensors"),
    best: BestBy = None,
    dir: OfScriptRun = None,
    part: ExportedPart = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a run's model: its weights as .safetensors, or the model itself, without its Python
    code, as .onnx or .pt2 (torch.export). Arguments after -- go to the script."""
    if out.suffix == ".safetensors":
        from manyhands.cli.export import export_weights

        print(export_weights(file, out, best, dir, part))
        return
    from manyhands.cli.export_graph import export_graph

    export_graph(file, out, best, dir, part, overwrite, own(context))


def evaluate(
    context: typer.Context,
    file: TaskOrRun,
    words: PlanWords = None,
    best: BestBy = None,
    data: WhichData = "test",
    dir: OfScriptRun = None,
    json: JsonOut = False,
) -> None:
    """Evaluate a task by the weights that a run has saved, over ranks. Arguments after -- go to the
    script."""
    check_words(words or [])
    from manyhands.cli.evaluate import evaluate as verb

    verb(file, words or [], best, data, dir, json, own(context))


def predict(
    context: typer.Context,
    file: TaskOrRun,
    words: PlanWords = None,
    out: PredictionOut = None,
    best: BestBy = None,
    data: WhichData = "test",
    dir: OfScriptRun = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a model's outputs for all test samples to a file, over ranks. Arguments after -- go to
    the script."""
    check_words(words or [])
    from manyhands.cli.predict import predict as verb

    verb(file, words or [], out, best, data, dir, overwrite, own(context))
