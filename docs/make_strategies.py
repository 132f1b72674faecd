"""Write docs/strategies/: a page for each merge strategy, from its docstring and its fields.

`make docs` runs this; a test compares. What a docstring holds: one line; the equation, indented;
what it does and costs; "Use it when ..."; "Paper: ...".
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from manyhands.core import Store
from manyhands.merge import STRATEGIES
from manyhands.plan.words import _text

WIDTH = 100
FOLDER = Path(__file__).parent / "strategies"


def page(name: str) -> str:
    strategy = STRATEGIES[name]
    summary, *rest = inspect.cleandoc(sys.modules[strategy.__module__].__doc__ or "").split("\n\n")
    how = f"Sends {strategy.sends} {'from rank to rank' if strategy.swaps else 'by all-reduce'}."
    if strategy.link is Store:
        how = (
            f"Pulls the model from servers and pushes {strategy.sends} to them: "
            f"`data=4 servers=1 merge={name}`."
        )
    source = f"[{name}.py](../../src/manyhands/merge/{name}.py)"
    end = f"{how} Source: {source}. All merge strategies: [which one?](README.md)"
    body = [part if part.startswith("    ") else _prose(part) for part in rest]
    parts = [
        f"# `merge={name}`",
        _prose(summary),
        *body,
        "## Options",
        *_options(name),
        _filled(end),
    ]
    return "\n\n".join(parts) + "\n"


def _prose(part: str) -> str:
    """One paragraph; what Markdown would take for markup is kept as written."""
    joined = " ".join(line.strip() for line in part.splitlines())
    joined = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", joined)
    joined = re.sub(r"^Paper: ", "**Paper.** ", joined)
    joined = re.sub(r"^Use it when ", "**Use it when** ", joined)
    before, use_it, when = joined.partition(". Use it when ")  # as the end of a paragraph
    if use_it:
        return f"{_filled(before + '.')}\n\n{_filled('**Use it when** ' + when)}"
    return _filled(joined)


def _filled(text: str) -> str:
    filled = textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    filled = re.sub(r"^(\d+)([.)]) ", r"\1\\\2 ", filled, flags=re.MULTILINE)  # this begins no list
    return re.sub(r"^([-+*#>]) ", r"\\\1 ", filled, flags=re.MULTILINE)


def _options(name: str) -> list[str]:
    strategy: Any = STRATEGIES[name]
    kinds = get_type_hints(strategy)
    fields = dataclasses.fields(strategy)
    if not fields:
        return ["It has none."]
    rows = ["| word | values | default |", "|---|---|---|"]
    for field in fields:
        default = "-" if field.default is None else f"`{_text(field.default)}`"
        rows.append(f"| `merge.{field.name}` | {_values(kinds[field.name])} | {default} |")
    unset = "A dash: not set; the text above says what holds then."
    return ["\n".join(rows), *([unset] if any(f.default is None for f in fields) else [])]


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
    print(f"{len(STRATEGIES)} pages in docs/strategies")


if __name__ == "__main__":
    main()
