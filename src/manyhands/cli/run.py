"""`manyhands run script.py data=4`: train a script's task, or run its own loop, on 4 processes."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

from manyhands.assembly.rank_context import Options
from manyhands.entry import defines_task, start, work_script


def run(
    script: Path,
    words: list[str],
    directory: Path | None,
    resume: bool,
    tensorboard: bool,
    quiet: bool,
    port: int,
    anyway: bool,
    arguments: list[str],
) -> None:
    """`arguments`: the script's own, which it finds in sys.argv."""
    options = Options(
        script.stem,
        None if directory is None else str(directory),
        resume,
        tensorboard,
        quiet,
        anyway=anyway,
        script=str(script.resolve()),
        arguments=tuple(arguments),
    )
    if (line := main_block_train(script)) is not None:
        print(
            f"{script}: its task() is run under the words given here; the call of train() in line "
            f"{line}, with words of its own, is not made",
            file=sys.stderr,
        )
    body = functools.partial(work_script, str(script), arguments, words)
    start(body, words, options, port)


def main_block_train(script: Path) -> int | None:
    """The line in which a script with a task() calls train() with more than that task, in code that
    a run of the task leaves out; None: it does not."""
    if not defines_task(script):
        return None
    for block in ast.parse(script.read_text()).body:
        if not isinstance(block, ast.If):
            continue
        for node in ast.walk(block):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name == "train" and len(node.args) + len(node.keywords) > 1:
                    return node.lineno
    return None
