"""Write docs/reference/cli.md: every verb with its arguments and options, from the verb's function.

`make docs` runs this; a test compares the page with the command line.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from manyhands.cli.main import app

PAGE = Path(__file__).parent / "reference" / "cli.md"
WIDTH = 100
NEEDED = object()
READ_ON = {  # the page that explains what a verb is for
    "demo": ("A first run", "../tutorials/first-run.md"),
    "run": ("Plan words", "../plan-words.md"),
    "verify": ("What the same means", "../concepts.md#exact-and-order"),
    "race": ("Race several plans", "../race.md"),
    "chaos": ("Break a run on purpose", "../chaos.md"),
    "lab": ("Make slow links in a lab", "../lab.md"),
    "server": ("Start servers by hand", "../how-to/start-servers.md"),
    "servers": ("Add and drain servers", "../server.md#add-and-drain-servers"),
    "trace": ("Events", "events.md"),
    "evaluate": ("After training", "../after-training.md"),
    "predict": ("After training", "../after-training.md"),
    "export": ("Resume, checkpoints, export", "../checkpoints.md"),
    "doctor": ("Troubleshooting", "../troubleshooting.md"),
    "bench": ("Benchmarks", "../../benchmarks/README.md"),
}
HEAD = """# Command line

`manyhands VERB ...`, or `python -m manyhands VERB ...`. `make docs` writes this page from the
command line's own help; `manyhands VERB --help` prints the same.

A verb ends with exit code 0 when it did what it was asked, 1 when what was asked for failed (a
rank died, a verdict is DIFFERENT), 2 when the plan, the task or an option is wrong, 130 after
Ctrl-C, and 143 after SIGTERM. `race` ends with 3 when every run ended but not all reached the
target.
"""


@dataclass(frozen=True)
class Parameter:
    """An argument or an option of a verb, as its function declares it."""

    name: str
    kind: Any
    info: Any  # typer's: help, metavar, param_decls
    default: Any

    @property
    def is_option(self) -> bool:
        return isinstance(self.info, OptionInfo)

    @property
    def shown(self) -> str:
        """An argument in the line of usage; an option with its flag and what it takes."""
        if not self.is_option:
            name = self.info.metavar or self.name.upper()
            return name if self.info.metavar or self.default is NEEDED else f"[{name}]"
        # inside Annotated, typer takes the first flag for the default until it reads the function
        declared = [self.info.default, *(self.info.param_decls or ())]
        named = (d for d in declared if isinstance(d, str) and d.startswith("--"))
        flag = next(named, f"--{self.name.replace('_', '-')}")
        base = next((k for k in (get_args(self.kind) or (self.kind,)) if k is not NoneType), str)
        takes = {bool: "", int: " N", Path: " PATH"}.get(base, " TEXT")
        return f"{flag} {self.info.metavar}" if self.info.metavar else f"{flag}{takes}"

    @property
    def row(self) -> str:
        unset = self.default is None or self.default is False
        default = "needed" if self.default is NEEDED else "-" if unset else f"`{self.default}`"
        return f"| `{_cell(self.shown)}` | {default} | {_cell(self.info.help or '')} |"


def verbs() -> dict[str, Callable[..., Any]]:
    found = [(c.name, c.callback) for c in app.registered_commands if c.callback is not None]
    return {name or verb.__name__.replace("_", "-"): verb for name, verb in found}


def parameters(verb: Callable[..., Any]) -> list[Parameter]:
    kinds = get_type_hints(verb, include_extras=True)
    found = []
    for name, declared in inspect.signature(verb).parameters.items():
        if kinds[name] is typer.Context:  # no word of the command line
            continue
        kind, info = get_args(kinds[name])
        default = NEEDED if declared.default is inspect.Parameter.empty else declared.default
        found.append(Parameter(name, kind, info, default))
    return found


def page() -> str:
    return "\n".join([HEAD, *(_verb(name, verb) for name, verb in verbs().items())])


def _verb(name: str, verb: Callable[..., Any]) -> str:
    declared = parameters(verb)
    arguments = [p for p in declared if not p.is_option]
    options = [p for p in declared if p.is_option]
    usage = ["manyhands", name, *(["[OPTIONS]"] if options else []), *(p.shown for p in arguments)]
    if typer.Context in get_type_hints(verb).values():  # verbs that run a script
        usage.append("[-- ARGUMENTS OF THE SCRIPT]")
    parts = [
        f"## `manyhands {name}`",
        textwrap.fill(" ".join((verb.__doc__ or "").split()), WIDTH),
        f"    {' '.join(usage)}",
    ]
    for what, rows in ("argument", arguments), ("option", options):
        if rows:
            head = [f"| {what} | default | meaning |", "|---|---|---|"]
            parts.append("\n".join([*head, *(p.row for p in rows)]))
    if name in READ_ON:
        title, target = READ_ON[name]
        parts.append(f"Read on: [{title}]({target}).")
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
