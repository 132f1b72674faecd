"""User line: where in the user's own code an error was raised."""

from __future__ import annotations

import linecache
import sysconfig
from pathlib import Path
from types import TracebackType

HERE = str(Path(__file__).parents[1])
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))


def user_line(error: BaseException) -> str:
    """The innermost line of the user's own that led to the error, to end its message with; "":
    there is none."""
    found, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not (file.startswith((HERE, "<frozen", *LIBRARIES)) or "site-packages" in file):
            found = _described(file, at)
        at = at.tb_next
    return found


def _described(file: str, at: TracebackType) -> str:
    text = linecache.getline(file, at.tb_lineno).strip()
    return f"\n  {file}, line {at.tb_lineno}, in {at.tb_frame.f_code.co_name}\n    {text}".rstrip()
