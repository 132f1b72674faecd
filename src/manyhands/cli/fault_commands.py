"""Commands about servers that come, go and break: parsed here, done in `servers` and `chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunningRun = Annotated[
    Path, typer.Argument(metavar="run", help="The directory of a run that is training.")
]


def servers(
    run: RunningRun,
    verb: Annotated[
        str, typer.Argument(metavar="verb", help="status, add, drain or rebalance.")
    ] = "status",
    server: Annotated[
        int | None, typer.Argument(metavar="server", help="Of drain: the server's number.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until every shard is where it belongs.")] = True,
) -> None:
    """Show, add or remove parameter servers of a run while it trains."""
    from manyhands.cli.servers import servers as work

    raise typer.Exit(work(run, verb, server, wait))


def add_to(app: typer.Typer) -> None:
    app.command()(servers)
