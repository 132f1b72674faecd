"""`manyhands run script.py data=4`: train a script's task, or run its own loop, on 4 processes."""

from __future__ import annotations

import functools
from pathlib import Path

from manyhands.assembly.rank_context import Options
from manyhands.entry import start, work_script


def run(
    script: Path,
    words: list[str],
    directory: Path | None,
    resume: bool,
    tensorboard: bool,
    quiet: bool,
    port: int,
    anyway: bool,
) -> None:
    options = Options(
        script.stem,
        None if directory is None else str(directory),
        resume,
        tensorboard,
        quiet,
        anyway=anyway,
    )
    body = functools.partial(work_script, str(script), [], words)
    start(body, words, options, port)
