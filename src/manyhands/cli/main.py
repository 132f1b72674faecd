"""`manyhands VERB ...`: parse, call the verb, turn errors into one message and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from manyhands.errors import LaunchError, ManyhandsError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Many hands make light work: train a PyTorch task on many processors.",
)

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


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with Fashion-MNIST; else MANYHANDS_DATA, the cache, a download, or scikit-learn's digits."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    epochs: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Train LeNet on this machine with several processes, and show what that brought."""
    from manyhands.cli.demo import demo as verb

    verb(data, workers, epochs)


@app.command()
def run(
    script: Script,
    words: PlanWords = None,
    dir: Annotated[
        Path | None, typer.Option("--dir", help="Run directory; default: runs/<script>-<time>.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest good checkpoint of --dir, or of this script's last run.",
        ),
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also where memory will not do by forecast.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
    port: Annotated[
        int, typer.Option(help="Port of the rendezvous; 0: any free one.", min=0, max=65535)
    ] = 0,
) -> None:
    """Train a script's task under a plan."""
    from manyhands.cli.run import run as verb

    verb(script, words or [], dir, resume, tensorboard, quiet, port, anyway)


@app.command()
def verify(
    script: Script,
    words: PlanWords = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.", min=1)] = 5,
    float32: Annotated[
        bool, typer.Option("--float32", help="Compare in float32 instead of float64.")
    ] = False,
) -> None:
    """Prove that the plan does what one process would do, on your own task."""
    from manyhands.cli.verify import verify as verb

    raise typer.Exit(0 if verb(script, words or [], steps, float32) else 1)


@app.command()
def race(
    script: Script,
    plans: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PLAN...",
            help='What to race, a plan a word: ddp "data=2 merge=local_sgd". ddp is torch DDP.',
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="When a plan is there: accuracy=0.88, or -loss=0.3 for at most."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Runs of every plan, each with its own seed; default: 1.", min=1),
    ] = None,
    common: Annotated[
        list[str] | None, typer.Option("--with", help='Words for all plans: "data=4 epochs=10".')
    ] = None,
    dir: Annotated[
        Path | None,
        typer.Option("--dir", help="Race directory; default: runs/<script>-race-<time>."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the race in --dir, or with this script's last one."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the table.")] = False,
) -> None:
    """Train under several plans until each reaches a target: who is there first, and at what cost."""
    from manyhands.cli.race.command import verb

    raise typer.Exit(verb(script, plans or [], target, seeds, common or [], dir, resume, quiet))


@app.command(context_settings={"allow_interspersed_args": False})
def lab(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="[--] VERB ...",
            help="What to run there: run, race, verify or bench, with its arguments.",
        ),
    ],
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 2,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Of each host's link, each way, e.g. 200mbit, 1gbit, 1.5gbit; default: no limit."
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(help="Of each message between hosts, e.g. 5ms; needs netem in the kernel."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Of packets between hosts, e.g. 0.1%; needs netem in the kernel."),
    ] = None,
) -> None:
    """Run a command on several hosts with slow links, all of them on this Linux machine."""
    from manyhands.cli.lab import lab as verb

    raise typer.Exit(verb(hosts, rate, delay, loss, command))


@app.command()
def server(
    role: Annotated[
        str | None, typer.Option(help="server or coordinator; default: DMLC_ROLE, else a server.")
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            help="Address to listen at; default: loopback, or the one that leads to the coordinator."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="0: any free one, which is the default.", min=0, max=65535)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many will come.", min=1)] = None,
    servers: Annotated[
        int | None, typer.Option(help="How many a coordinator waits for.", min=1)
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Whom a server joins; default: it coordinates itself."
        ),
    ] = None,
    shards: Annotated[
        int, typer.Option(help="Parts that work at the same time; as many cores are of use.", min=1)
    ] = 1,
    memory: Annotated[
        str | None,
        typer.Option(help="For rows, e.g. 8GiB: then no new ones are admitted; default: no limit."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="The secret that workers and servers share; made if it does not exist."),
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rules",
            metavar="MODULE",
            help="Whose rules tables may name; may be given several times.",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="This server's certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Who signed the others' certificates, PEM.")
    ] = None,
) -> None:
    """Start a parameter server, or the coordinator of several, by hand; PS-Lite's DMLC_ variables fill what is left out."""
    from manyhands.cli.server import Given
    from manyhands.cli.server import server as verb

    words = (
        role,
        bind,
        port,
        workers,
        servers,
        coordinator,
        shards,
        memory,
        token_file,
        tuple(rules or ()),
    )
    raise typer.Exit(verb(Given(*words, tls_cert, tls_key, tls_ca)))


@app.command()
def trace(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: trace.json in the run directory.")
    ] = None,
) -> None:
    """Write one Perfetto/Chrome trace of all ranks of a run."""
    from manyhands.cli.trace import trace as verb

    print(verb(run, out))


@app.command()
def export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")] = Path(
        "model.safetensors"
    ),
    best: Annotated[
        str | None,
        typer.Option(
            help="Take the best checkpoint by this metric (accuracy, or -loss for the smallest) instead of the newest."
        ),
    ] = None,
) -> None:
    """Write a run's model as one safetensors file."""
    from manyhands.cli.export import export as verb

    print(verb(run, out, best))


@app.command()
def doctor() -> None:
    """Look at this machine: versions, cores, memory, ports, network cards, bandwidth between processes."""
    from manyhands.cli.doctor import doctor as verb
    from manyhands.launch import environment

    raise typer.Exit(verb(environment.variables()))


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="allreduce, compression, data-parallel, exchange, gpu, merge-strategies, "
            "model-parallel, overhead, robust, server, slow-network, sparse, store, stragglers, "
            "or all."
        ),
    ],
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write the claims as JSON.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A short run, to see that it works; its figures mean nothing."
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Measure only this claim; may be given several times."),
    ] = None,
) -> None:
    """Measure ours against a named peer in the same run."""
    from manyhands.cli.bench import bench as verb

    verb(name, json, quick, only)


def main() -> None:
    """Entry point: a message made for people is printed as such and last; anything else keeps its traceback."""
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
