"""Command line parser: parses `manyhands VERB ...`, calls the verb, prints errors as one message.

Each verb is imported inside its function, here and in `run_verbs` only: `--help` and every verb
would wait for the modules and libraries of all verbs otherwise.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from manyhands.cli.options import (
    Bind,
    ChaosFolder,
    ChaosSeed,
    Coordinator,
    CutFaults,
    FrameDelay,
    FrameDuplicates,
    FullDisk,
    Keep,
    KillFaults,
    MemoryLimit,
    NumServers,
    NumWorkers,
    OldRules,
    OptimizerModules,
    PauseFaults,
    PlanWords,
    Script,
    ServerPort,
    ServerRole,
    Shards,
    SlowFaults,
    TlsCA,
    TlsCert,
    TlsKey,
    TokenFile,
)
from manyhands.cli.run_verbs import evaluate, export, join, predict, scale, servers, trace
from manyhands.cli.script_command import ScriptCommand, own
from manyhands.errors import LaunchError, ManyhandsError, PlanError
from manyhands.launch.fork_server.client import PRELOAD, begin_early, held_early
from manyhands.plan.reading import check as check_words
from manyhands.plan.reading import several_ranks
from manyhands.user_traceback import trim

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Many hands make light work: train a PyTorch task on many processors.",
)


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with Fashion-MNIST; else MANYHANDS_DATA, the cache, a download, "
            "or scikit-learn's digits."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    epochs: Annotated[int, typer.Option(help="Passes over the data.", min=1)] = 2,
) -> None:
    """Train LeNet on this machine with several processes, and show accuracy and speed-up."""
    from manyhands.cli.demo import demo as verb

    verb(data, workers, epochs)


@app.command(cls=ScriptCommand)
def run(
    context: typer.Context,
    script: Script,
    words: PlanWords = None,
    dir: Annotated[
        Path | None, typer.Option("--dir", help="Run directory; default: runs/<script>-<time>.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest good checkpoint of --dir, or of this script's last run.",
        ),
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Start even if the memory forecast exceeds the memory.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
    port: Annotated[
        int, typer.Option(help="Port of the rendezvous; 0: any free one.", min=0, max=65535)
    ] = 0,
) -> None:
    """Train a script's task under a plan. Arguments after -- go to the script."""
    check_words(words or [])  # before torch is imported
    if several_ranks(words or []) and script.is_file():
        begin_early(PRELOAD)  # it loads torch while this process does
    with held_early():
        from manyhands.cli.run import run as verb

        verb(script, words or [], dir, resume, tensorboard, quiet, port, anyway, own(context))


@app.command(cls=ScriptCommand)
def verify(
    context: typer.Context,
    script: Script,
    words: PlanWords = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.", min=1)] = 5,
    float32: Annotated[
        bool, typer.Option("--float32", help="Compare in float32 instead of float64.")
    ] = False,
) -> None:
    """Check that the plan computes what one process would compute, on your own task. Arguments
    after -- go to the script."""
    check_words(words or [])
    from manyhands.cli.verify import verify as verb

    sys.argv = [str(script), *own(context)]
    raise typer.Exit(0 if verb(script, words or [], steps, float32) else 1)


@app.command(cls=ScriptCommand)
def race(
    context: typer.Context,
    script: Script,
    plans: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PLAN...",
            help='The plans, each one word of the shell: ddp "data=2 merge=local_sgd". '
            "ddp is torch DDP.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="The goal of every plan: accuracy=0.88, or -loss=0.3 for at most."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Runs of every plan, each with its own seed; default: 1.", min=1),
    ] = None,
    common: Annotated[
        list[str] | None,
        typer.Option("--with", help='Plan words for all plans: "data=4 epochs=10".'),
    ] = None,
    dir: Annotated[
        Path | None,
        typer.Option("--dir", help="Race directory; default: runs/<script>-race-<time>."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the race in --dir, or this script's last one."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the table.")] = False,
) -> None:
    """Train under several plans until each reaches a target; compare times and costs. Arguments
    after -- go to the script."""
    from manyhands.cli.race.command import verb

    given = (script, plans or [], target, seeds, common or [], dir, resume, quiet)
    raise typer.Exit(verb(*given, own(context)))


@app.command(cls=ScriptCommand)
def chaos(
    context: typer.Context,
    script: Script,
    words: PlanWords = None,
    kill: KillFaults = None,
    pause: PauseFaults = None,
    slow: SlowFaults = None,
    cut: CutFaults = None,
    full_disk: FullDisk = None,
    delay: FrameDelay = None,
    duplicate: FrameDuplicates = None,
    seed: ChaosSeed = 0,
    dir: ChaosFolder = None,
) -> None:
    """Break a run on purpose, its ranks or its servers, and prove that nothing was lost. Arguments
    after -- go to the script."""
    check_words(words or [])
    from manyhands.cli.chaos.command import ChaosOptions
    from manyhands.cli.chaos.command import chaos as verb

    kills, pauses, slows, cuts, disks = (
        tuple(texts or ()) for texts in (kill, pause, slow, cut, full_disk)
    )
    given = ChaosOptions(kills, pauses, slows, cuts, disks, delay, duplicate, seed)
    raise typer.Exit(verb(script, words or [], given, dir, own(context)))


@app.command(context_settings={"allow_interspersed_args": False})
def lab(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="[--] VERB ...",
            help="The command to run: run, race, verify or bench, with its arguments.",
        ),
    ],
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Bandwidth of each host, each way, e.g. 200mbit, 1.5gbit; default: no limit."
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(help="Delay of messages between hosts, e.g. 5ms; needs netem in the kernel."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Loss of packets between hosts, e.g. 0.1%; needs netem in the kernel."),
    ] = None,
) -> None:
    """Run a command on several simulated hosts of this Linux machine, with a slow network."""
    from manyhands.cli.lab import lab as verb

    raise typer.Exit(verb(hosts, rate, delay, loss, command))


@app.command()
def server(
    role: ServerRole = None,
    bind: Bind = None,
    port: ServerPort = None,
    workers: NumWorkers = None,
    servers: NumServers = None,
    coordinator: Coordinator = None,
    shards: Shards = 1,
    memory: MemoryLimit = None,
    token_file: TokenFile = None,
    optimizers: OptimizerModules = None,
    rules: OldRules = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCA = None,
    keep: Keep = False,
) -> None:
    """Start a parameter server, or the coordinator of several, by hand.

    PS-Lite's DMLC_ variables set the options that are left out.
    """
    from manyhands.cli.server import Given
    from manyhands.cli.server import server as verb

    if rules:
        raise PlanError(f"--rules {rules[0]}: the option is now --optimizers {rules[0]}")
    given = Given(
        role,
        bind,
        port,
        workers,
        servers,
        coordinator,
        shards,
        memory,
        token_file,
        tuple(optimizers or ()),
        tls_cert,
        tls_key,
        tls_ca,
        keep,
    )
    raise typer.Exit(verb(given))


for of_a_script in (evaluate, predict):
    app.command(cls=ScriptCommand)(of_a_script)
for of_a_run in (servers, scale, join, trace):
    app.command()(of_a_run)
app.command(cls=ScriptCommand)(export)


@app.command()
def doctor() -> None:
    """Check this machine: versions, cores, memory, ports, network cards, bandwidth."""
    from manyhands.cli.doctor import doctor as verb
    from manyhands.launch import environment

    raise typer.Exit(verb(environment.variables()))


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="allreduce, compression, data-parallel, exchange, gpu, hogwild, hot-rows, "
            "large-start, large-tables, linear, merge-strategies, model-parallel, out-of-core, "
            "overhead, recovery, replication, robust, scaling, server, slow-network, sparse, "
            "start, store, stragglers, or all."
        ),
    ],
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the claims as JSON.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A short run, to see that it works; its numbers mean nothing."
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Measure only this claim; may be given several times."),
    ] = None,
) -> None:
    """Measure manyhands against another library in the same run."""
    from manyhands.cli.bench import bench as verb

    verb(name, json, quick, only)


def main() -> None:
    """Entry point: our errors are printed as one message; others with the user's own lines."""
    try:
        app()
    except LaunchError as e:
        print(f"\n{e}" if str(e).startswith("rank") else str(e), file=sys.stderr)
        sys.exit(e.exit_code)
    except ManyhandsError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as e:
        from manyhands.launch import environment

        if not environment.full_traceback():
            trim(e)
        traceback.print_exception(e)
        sys.exit(1)
