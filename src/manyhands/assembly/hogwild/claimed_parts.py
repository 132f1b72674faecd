"""Claimed parts: ranks with common parameters claim their batches from a counter in shared memory.

A rank that is free claims the next part of a step and computes it, so no rank waits for another
between two sync points. Claims are made under a lock of the operating system on a file, which it
also takes from a process that is killed.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import torch

from manyhands.assembly.data import Feed
from manyhands.assembly.hogwild.common_parameters import check_shared_memory, in_common
from manyhands.assembly.rank_context import RankContext
from manyhands.core import Plan
from manyhands.data.step_counter import WORDS, SharedStepCounter
from manyhands.exchange import segments
from manyhands.replica.module import ModuleReplica
from manyhands.trainer_parts import ActiveStrategy

PATH_BYTES = 4096


def set_pace(
    context: RankContext, plan: Plan, active: ActiveStrategy, feed: Feed, replica: ModuleReplica
) -> ActiveStrategy:
    """Have the ranks claim their steps from here on, or not, as the strategy that begins wants;
    returns the strategy."""
    limits, batches = feed.limits, feed.indexed
    if not in_common(context, active.strategy):
        if limits.claims is not None and active.word == "then":
            assert batches is not None
            batches.stop_claiming()
            limits.claims = limits.change_at = None
        return active
    assert batches is not None
    shared = check_shared_memory(context, active.name)
    words = shared.allocate(WORDS, torch.int64, common=True).numpy()
    lock = _file_lock(context)
    context.to_close.append(lock.close)
    counter = SharedStepCounter(words, shared.size, lock, context.data_group.barrier)
    claims = batches.claim_parts(counter.claim, counter.request_sync, shared.size)
    # a rank that was not given the last steps has a schedule that lags behind
    claims.on_sync = replica.stepped
    limits.claims = claims
    limits.change_at = plan.at if active.word == "merge" else None
    return active


class FileLock:
    """Lock that the operating system holds on a file: one process at a time is inside."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def __enter__(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _file_lock(context: RankContext) -> FileLock:
    """A lock of all ranks. Rank 0 makes the file; it is unlinked as soon as all have opened it."""
    group, text = context.data_group, torch.zeros(PATH_BYTES, dtype=torch.uint8)
    made = None
    if group.rank == 0:
        made, memory = segments.create(64)
        memory.close()
        raw = torch.frombuffer(bytearray(str(made).encode()), dtype=torch.uint8)
        text[: len(raw)] = raw
    try:
        group.broadcast({"lock": text}).wait()
        lock = FileLock(Path(bytes(text.tolist()).rstrip(b"\0").decode()))
        group.barrier()
    finally:
        if made is not None:
            made.unlink(missing_ok=True)
    return lock
