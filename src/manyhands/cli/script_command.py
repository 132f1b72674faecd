"""Script command: a verb of the command line whose script has arguments of its own."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class ScriptCommand(TyperCommand):
    """A verb that runs a script: what stands after `--` are the script's own arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        here = args.index("--") if "--" in args else len(args)
        ctx.meta[OWN] = args[here + 1 :]
        try:
            return super().parse_args(ctx, args[:here])
        except Exception as e:
            if type(e).__name__ != "NoSuchOption" or here < len(args):
                raise
            # BadParameter, because typer does not export the class of the error
            said = f"{e.format_message()}. "  # type: ignore[attr-defined]
            raise typer.BadParameter(
                f"{said}Options of the script's own go after --: manyhands run FILE -- --lr 0.1"
            ) from None


OWN = "manyhands.own"  # key of the script's own arguments in a context


def own(context: typer.Context) -> list[str]:
    """The script's own arguments."""
    return list(context.meta[OWN])
