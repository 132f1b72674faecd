"""Tuning of peers: what ours does for itself, and what a careful user sets by hand.

    fused optimizer     one kernel for all parameters (ours takes it where torch has it)
    kept memory         malloc keeps freed blocks (ours sets it in every rank)
    DDP                 gradients are views of its buckets; a static graph
    congestion control  cubic, for as long as a benchmark runs: BBR paces packets, on loopback too

The last is of the whole machine (of this network namespace), so ours has it as well, and it is put
back afterwards. It needs root; without, benchmarks run with what is there, and say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.launch.malloc import keep_freed_memory

CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
LOOPBACK = "cubic"
AS_WRITTEN, TUNED = "as written", "tuned"


@contextmanager
def loopback_control() -> Iterator[str]:
    """TCP connections opened meanwhile do not pace; yields what they have, in words."""
    try:
        before = CONTROL.read_text().strip()
        CONTROL.write_text(LOOPBACK)
    except OSError as e:
        yield f"the machine's own ({e.strerror}: setting it needs root, on Linux)"
        return
    try:
        yield LOOPBACK if before == LOOPBACK else f"{LOOPBACK} ({before} is put back afterwards)"
    finally:
        CONTROL.write_text(before)


def sgd(parameters: Any, how: str = TUNED) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=how == TUNED or None)


def settle(how: str) -> None:
    """What a process sets before its first tensor."""
    if how == TUNED:
        keep_freed_memory()


def ddp(model: nn.Module, how: str) -> nn.Module:
    if how != TUNED:
        return DistributedDataParallel(model)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
