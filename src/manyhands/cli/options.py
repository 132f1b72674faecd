"""Options and arguments of commands that are long or used by several; see `main`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Script = Annotated[
    Path,
    typer.Argument(
        help="A Python file that defines task(), or a training loop that calls manyhands.join().",
        exists=True,
        dir_okay=False,
    ),
]
PlanWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[WORD=VALUE]...", help="The plan, e.g. data=4 precision=bf16; also a .toml file."
    ),
]
RunFolder = Annotated[Path, typer.Argument(help="A run directory.", exists=True, file_okay=False)]
TaskFile = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="The task file, where it is not where the run has it."),
]
ServerRole = Annotated[
    str | None, typer.Option(help="server or coordinator; default: DMLC_ROLE, else a server.")
]
Bind = Annotated[
    str | None,
    typer.Option(
        help="Address to listen at; default: loopback, or the one that reaches the coordinator."
    ),
]
ServerPort = Annotated[
    int | None, typer.Option(help="0, the default: any free one.", min=0, max=65535)
]
NumWorkers = Annotated[int | None, typer.Option(help="Workers that will join.", min=1)]
NumServers = Annotated[int | None, typer.Option(help="Servers a coordinator waits for.", min=1)]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The coordinator that a server joins; default: it coordinates itself.",
    ),
]
Shards = Annotated[
    int, typer.Option(help="Shards that serve in parallel; each can use one core.", min=1)
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        help="Limit for rows, e.g. 8GiB, beyond which no new ones are made; default: none."
    ),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep",
        help="Go on when all workers have left: for several runs, each in its MANYHANDS_NAMESPACE, "
        "and for mh.Store.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="The secret that workers and servers share; made if it does not exist."),
]
OptimizerModules = Annotated[
    list[str] | None,
    typer.Option(
        "--optimizers",
        metavar="MODULE",
        help="A module whose server optimizers tables may use; may be given several times.",
    ),
]
OldRules = Annotated[list[str] | None, typer.Option("--rules", hidden=True)]  # of version 0.1
TlsCert = Annotated[Path | None, typer.Option(help="This server's certificate, PEM.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its key, PEM.")]
TlsCA = Annotated[Path | None, typer.Option(help="Who signed the others' certificates, PEM.")]
RunningRun = Annotated[
    Path, typer.Argument(metavar="run", help="The directory of a run that is training.")
]
ServersVerb = Annotated[str, typer.Argument(metavar="verb", help="status, add, drain, rebalance.")]
ServerNumber = Annotated[
    int | None, typer.Argument(metavar="server", help="Of drain: the server's number.")
]
WaitForShards = Annotated[bool, typer.Option(help="Wait until every shard is where it belongs.")]
KillFaults = Annotated[
    list[str] | None,
    typer.Option(
        "--kill",
        metavar="TARGET@TIME",
        help="Kill server, server:N, worker, worker:RANK, coordinator or launcher: server@20s, "
        "worker@random. Of this and the next four, several may be given.",
    ),
]
PauseFaults = Annotated[
    list[str] | None,
    typer.Option(
        "--pause",
        metavar="TARGET@TIME/DURATION",
        help="Stop a process for a while: server:1@5s/3s.",
    ),
]
SlowFaults = Annotated[
    list[str] | None,
    typer.Option(
        "--slow",
        metavar="WORKER@TIME/DURATION*FACTOR",
        help="Let a worker take so many times as long for a while: worker:1@5s/10s*4.",
    ),
]
CutFaults = Annotated[
    list[str] | None,
    typer.Option(
        "--cut",
        metavar="TARGET@TIME",
        help="Drop all connections of a server, server:0@8s; in a lab, cut a host off, host:1@8s.",
    ),
]
FullDisk = Annotated[
    list[str] | None,
    typer.Option(
        "--full-disk", metavar="TIME/DURATION", help="Nothing can be written for a while: 6s/4s."
    ),
]
FrameDelay = Annotated[
    str | None, typer.Option("--delay", help="Delay of every frame to a server: 5ms.")
]
FrameDuplicates = Annotated[
    float | None, typer.Option("--duplicate", help="Share of frames that are sent twice: 0.05.")
]
ChaosSeed = Annotated[int, typer.Option("--seed", help="Of random times and targets.")]
ChaosFolder = Annotated[
    Path | None,
    typer.Option(
        "--dir", help="Directory of both runs and chaos.json; default: runs/<script>-chaos-<time>."
    ),
]
TaskOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="FILE_OR_RUN",
        help="A Python file that defines task(), or the directory of a run of one.",
        exists=True,
    ),
]
OfScriptRun = Annotated[
    Path | None,
    typer.Option("--dir", help="The run whose weights are taken; default: the file's last run."),
]
BestBy = Annotated[
    str | None,
    typer.Option(
        help="Take the best checkpoint by this metric (accuracy, or -loss for the smallest) "
        "instead of the newest."
    ),
]
WhichData = Annotated[str, typer.Option(help="test or train: which data of the task.")]
JsonOut = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
PredictionOut = Annotated[
    Path | None,
    typer.Option(help="The file to write: .parquet, .csv, .npz or .pt; it must be given."),
]
ExportOut = Annotated[Path, typer.Argument(help="The file to write: .safetensors, .onnx or .pt2.")]
ExportedPart = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Of .onnx and .pt2: a submodule, or one of several models, alone."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")]
