"""Loops that numba compiles: without the interpreter's lock, once, and then read from the disk.

    @compiled      a loop that Python calls
    @inlined       a part of such loops
    compiling()    the same with options of one's own

numba keeps machine code for as long as the file of its function is the same. But constants and inlined functions of other files are
in that code too, and `__pycache__` outlives an upgrade: a table could be read with what the version before knew of its layout. So all
that is compiled here is compiled anew when any file that compiles something has changed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

PACKAGE = Path(__file__).parent


@functools.cache
def _sources() -> str:
    """One word for the content of all files of the package that have to do with compiled code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_bytes()
        if any(word in text for word in (b"@compiled", b"compiling(", b"@intrinsic")):
            digest.update(text)
    return digest.hexdigest()


class _Cache(caching.FunctionCache):
    def __init__(self, function: Any):
        super().__init__(function)
        stamp = (
            self._impl.locator.get_source_stamp(),
            _sources(),
        )  # numba's own, of the function's file, and ours
        self._cache_file = caching.IndexDataCacheFile(
            self._cache_path, self._impl.filename_base, stamp
        )


def compiling(**options: Any) -> Callable[[Any], Any]:
    """A decorator; options are those of numba.njit."""

    def decorate(function: Any) -> Any:
        dispatcher = numba.njit(nogil=True, **options)(function)
        dispatcher._cache = _Cache(function)  # as its enable_caching does
        return dispatcher

    return decorate


compiled = compiling(error_model="numpy", boundscheck=False)
inlined = compiling(error_model="numpy", boundscheck=False, forceinline=True)
