"""Data folders: where data sets are searched for, and where downloads are kept.

Folders are searched in this order: the one given, $MANYHANDS_DATA, the user's cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from manyhands.errors import TaskError


class DatasetNotFound(TaskError):
    """No folder holds the data set.

    Callers that can use other data catch this one. Damaged files raise a plain TaskError.
    """


def cache() -> Path:
    """The folder of downloads: $XDG_CACHE_HOME/manyhands, else ~/.cache/manyhands."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "manyhands"


def folders(data: Path | str | None) -> list[Path]:
    """The folders to search, in order, without repetition."""
    named = [data, os.environ.get("MANYHANDS_DATA"), cache()]
    return list(dict.fromkeys(Path(folder).expanduser() for folder in named if folder))


def find(data: Path | str | None, under: str, names: Iterable[str], what: str) -> Path:
    """The first folder, or its sub-folder `under`, that holds all files of `names`."""
    searched = folders(data)
    for folder in searched:
        for place in (folder / under, folder):
            if all((place / name).is_file() for name in names):
                return place
    raise DatasetNotFound(
        f"{what} not found in {', '.join(map(str, searched))} (or {under}/ there); "
        "set MANYHANDS_DATA to a folder that has it"
    )
