"""Limits the malloc arenas of a server process, so that its memory does not seem to leak."""

import contextlib
import ctypes
import sys
import threading

M_ARENA_MAX = -8  # of mallopt


def limit_malloc_arenas() -> None:
    """Two arenas, and stacks of 1 MiB.

    glibc gives threads malloc arenas of their own, up to 8 per core, and each keeps what its
    threads freed: a server whose connections come and go would look as if it leaked. Large buffers
    are reused here and small objects are Python's, so 2 suffice. glibc also keeps the stacks of
    threads that ended; stacks of 1 MiB are not backed by huge pages of 2 MiB.
    """
    threading.stack_size(1 << 20)
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
