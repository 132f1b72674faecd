"""Compilation of kernels by numba: without the GIL, cached on disk, stamped with our sources.

    @compiled      a kernel that Python calls
    @inlined       a function that kernels call; always inlined, so a constant argument is folded
    compiling()    a decorator like these two, with options of its own

numba keeps cached machine code while the file of the function is the same. But constants and
inlined functions of other files are in that code too, and `__pycache__` outlives an upgrade: a
kernel could read a table by the layout of an older version. So the cache's stamp also covers the
content of every file of the package that compiles something: when one changes, all compile again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import caching

PACKAGE = Path(__file__).parent.parent
MARKS = (b"@compiled", b"@inlined", b"compiling(", b"@intrinsic")

# Kernels compute offsets in these: a signed index costs a check for negative numbers per access.
U64, U32 = np.uint64, np.uint32


@functools.cache
def _sources() -> str:
    """Digest of all files of the package that compile something."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_bytes()
        if any(mark in text for mark in MARKS):
            digest.update(text)
    return digest.hexdigest()


class _Cache(caching.FunctionCache):
    def __init__(self, function: Any):
        super().__init__(function)
        # numba's own stamp, of the function's file, and ours
        stamp = (self._impl.locator.get_source_stamp(), _sources())
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
