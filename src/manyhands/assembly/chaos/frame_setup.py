"""Frame faults of a rank, as the environment asks for them."""

from __future__ import annotations

import random

from manyhands.launch import environment
from manyhands.server.protocol import frame_faults
from manyhands.server.protocol.frame_faults import FrameFaults


def install_frame_faults(rank: int) -> None:
    """Before this rank connects to servers."""
    asked = environment.chaos()
    faults = None
    if asked is not None and asked.sockets:
        drawn = random.Random(f"{asked.seed}/{rank}")
        faults = FrameFaults(asked.delay_s, asked.duplicate, drawn)
    frame_faults.install(faults)
