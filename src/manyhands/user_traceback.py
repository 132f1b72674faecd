"""User traceback: what an error shows of the user's code, without the frames of manyhands.

    mine.py:40 <module>  ->  manyhands/...  ->  mine.py:12 task  ->  torch/...
                             left out

An error that arises in manyhands itself, and is not raised on purpose, keeps all its frames.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import TracebackType

from manyhands.errors import ManyhandsError

OURS = str(Path(__file__).parent) + os.sep
STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
# who calls a script or a command, between frames of ours
CALLERS = ("typer", "click", "greenlet", "cloudpickle")
# functions of torch between model(x) and forward
OF_MODULES = ("_wrapped_call_impl", "_call_impl")
# what manyhands itself calls: an error in these may be ours
CALLED = ("torch", "numpy", "numba", "msgspec", "safetensors", "pyarrow", *CALLERS)


def trim(error: BaseException) -> None:
    """Leave frames of manyhands out of the traceback of an error, and of those it came from."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        found.__traceback__ = _trimmed(found)
        after = None if found.__suppress_context__ else found.__context__
        found = found.__cause__ or after


def _trimmed(error: BaseException) -> TracebackType | None:
    links = []
    link = error.__traceback__
    while link is not None:
        links.append(link)
        link = link.tb_next
    files = [link.tb_frame.f_code.co_filename for link in links]
    last = max((i for i, file in enumerate(files) if file.startswith(OURS)), default=None)
    if last is None:
        return error.__traceback__
    if not isinstance(error, ManyhandsError) and all(map(_calls, files[last + 1 :])):
        return error.__traceback__
    kept: TracebackType | None = None
    for link, file in zip(reversed(links), reversed(files), strict=True):
        calls = file.startswith(OURS) or file == "<frozen runpy>" or _is_of(file, CALLERS)
        if not calls and not (kept and link.tb_frame.f_code.co_name in OF_MODULES):
            kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def _calls(file: str) -> bool:
    """Whether it is a file of a library that manyhands itself calls, or of Python's own."""
    standard = file.startswith(STANDARD) and "site-packages" not in file
    return standard or file.startswith("<frozen") or _is_of(file, CALLED)


def _is_of(file: str, packages: tuple[str, ...]) -> bool:
    parts = Path(file).parts
    after = next((i + 1 for i, p in enumerate(parts) if p in ("site-packages", "dist-packages")), 0)
    return after > 0 and parts[after].removesuffix(".py") in packages
