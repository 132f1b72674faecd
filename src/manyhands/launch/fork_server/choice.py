"""Whether ranks are forked from a fork server here, or each is started as a process of its own.

Reads the environment by itself: `launch.environment` needs torch, which is not loaded yet.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from manyhands.errors import LaunchError


def why_not() -> str:
    """Why ranks cannot be forked on this machine; "": they can."""
    wanted = os.environ.get("MANYHANDS_START", "")
    if wanted not in ("", "exec", "fork"):
        raise LaunchError(f"MANYHANDS_START={wanted}; needed: exec or fork, or do not set it")
    if wanted == "exec":
        return "MANYHANDS_START=exec"
    # macOS: its frameworks may not be used after a fork
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} is not Linux"
    needed = (os, "fork"), (os, "pidfd_open"), (signal, "pidfd_send_signal"), (socket, "send_fds")
    if missing := [name for module, name in needed if not hasattr(module, name)]:
        return f"this Python has no {missing[0]}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if wanted != "fork" and not hidden and _has_gpu():
        return "a GPU is visible: its driver must not be forked"
    return ""


def _has_gpu() -> bool:
    """By their device files, because asking CUDA would start it in this process."""
    named = (Path("/dev/kfd"), Path("/dev/dxg"))
    return any(Path("/dev").glob("nvidia[0-9]*")) or any(p.exists() for p in named)


def started_by_others() -> bool:
    """Whether this process is a rank already, or in a lab: it starts no ranks on this machine."""
    return bool(
        os.environ.get("RANK")
        or os.environ.get("SLURM_PROCID")
        or os.environ.get("OMPI_COMM_WORLD_RANK")
        or os.environ.get("MANYHANDS_LAB")
    )
