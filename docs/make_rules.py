"""Write docs/rules/: a page for each merge rule, from its docstring and its fields. `make docs` runs this; a test compares.

docstring: one line; the equation, indented; what it does and costs; "Use it when ..."; "Paper: ..."
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from manyhands.core import Store
from manyhands.merge import STRATEGIES
from manyhands.plan.words import _text

FOLDER = Path(__file__).parent / "rules"


def page(name: str) -> str:
    rule = STRATEGIES[name]
    summary, *rest = inspect.cleandoc(sys.modules[rule.__module__].__doc__ or "").split("\n\n")
    body = "\n\n".join(part if _is_block(part) else _prose(part) for part in rest)
    body = body.replace(
        ". Use it when ", ".\n\n**Use it when** "
    )  # where it is the last sentence of a paragraph
    how = f"Sends {rule.sends} {'from rank to rank' if rule.swaps else 'by all-reduce'}"
    if rule.link is Store:
        how = f"Pulls the model from servers and pushes {rule.sends} to them: `data=4 servers=1 merge={name}`"
    source = f"[{name}.py](../../src/manyhands/merge/{name}.py)"
    return (
        f"# `merge={name}`\n\n{_prose(summary)}\n\n{body}\n\n## Options\n\n{_options(name)}\n"
        f"{how}. Source: {source}. All rules: [which one?](README.md)\n"
    )


def _is_block(part: str) -> bool:
    return part.startswith("    ")


def _prose(part: str) -> str:
    """One paragraph; what Markdown would take for markup is kept as written."""
    joined = " ".join(line.strip() for line in part.splitlines())
    joined = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", joined)
    head, _, tail = joined.partition(": ")
    if head == "Paper":
        return f"**Paper.** {tail}"
    return (
        joined.replace("Use it when", "**Use it when**", 1)
        if joined.startswith("Use it when")
        else joined
    )


def _options(name: str) -> str:
    rule: Any = STRATEGIES[name]
    kinds = get_type_hints(rule)
    rows = [
        f"| `merge.{f.name}` | {_values(kinds[f.name])} | "
        f"{'-' if f.default is None else f'`{_text(f.default)}`'} |"
        for f in dataclasses.fields(rule)
    ]
    unset = (
        ["A dash: not set; the text above says what holds then.", ""]
        if any(f.default is None for f in dataclasses.fields(rule))
        else []
    )
    return (
        "\n".join(["| word | values | default |", "|---|---|---|", *rows, "", *unset])
        if rows
        else "It has none.\n"
    )


def _values(kind: Any) -> str:
    if kind in (int, float, bool, str):
        return {int: "a whole number", float: "a number", bool: "true, false", str: "a word"}[kind]
    if kind is type(None):
        return "none"
    if get_origin(kind) is not None and get_args(kind):
        parts = [str(a) if isinstance(a, str) else _values(a) for a in get_args(kind)]
        return ", ".join(p for p in parts if p != "none")
    return str(kind)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.md"):
        if old.stem not in STRATEGIES and old.name != "README.md":
            old.unlink()
    for name in STRATEGIES:
        (FOLDER / f"{name}.md").write_text(page(name))
    print(f"{len(STRATEGIES)} pages in docs/rules")


if __name__ == "__main__":
    main()
