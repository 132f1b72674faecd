"""Round log: every round that a rank of a run without servers has computed, line by line.

Kept where `manyhands chaos` watches the run, in RUN/ledger/rounds-<pid>.jsonl. A line is
written when its round ends, before this rank takes part in the next exchange. So kill -9 loses no
round that the others know to be complete. A process adds to its file in each membership epoch that
it takes part in:

    begin     who this process is in the epoch, and after which round the epoch goes on
    round     its number, end, positions before and after; samples of its last step, here and on
              all ranks
    end       metrics
    failure   why it ended

Rounds after the boundary from which a later epoch went on do not count: see
`manyhands.cli.chaos.rank_history`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.assembly.data import Feed
from manyhands.assembly.rank_context import RankContext
from manyhands.core import Position
from manyhands.launch import environment
from manyhands.task import Callback

FOLDER, PREFIX = "ledger", "rounds-"


class RoundLog(Callback):
    """Of one trainer, in one membership epoch."""

    def __init__(self, context: RankContext, feed: Feed):
        self._context, self._feed = context, feed
        self._at: Position = feed.batches.position
        self._begun = False
        self._unwritten = b""  # the disk was full
        folder = Path(context.directory) / FOLDER
        folder.mkdir(exist_ok=True)
        # another one where a run was resumed
        self._start = environment.launcher_pid() or os.getpid()
        self._path = folder / f"{PREFIX}{os.getpid()}.jsonl"
        context.to_close.append(lambda: self._write(b""))

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        before = self._at
        self._begin(round - 1)
        batches = self._feed.batches
        self._at = batches.position
        line = {
            "round": round,
            "time_s": time.time(),
            "before": _plain(before),
            "after": _plain(self._at),
            "own": batches.own,
            "total": batches.total,
        }
        self._add(line)

    def on_end(self, run: Any) -> None:
        self._begin(run.trainer.round)
        self._add({"end": dict(run.trainer.metrics)})

    def on_failure(self, run: Any, error: BaseException) -> None:
        self._begin(run.trainer.round)
        self._add({"failure": f"{type(error).__name__}: {error}"})

    def _begin(self, round: int) -> None:
        """Before the first round of this trainer: it goes on after `round`."""
        if self._begun:
            return
        self._begun = True
        context, epoch = self._context, getattr(self._context.regrouping, "epoch", None)
        ranks = tuple(range(context.process.size))
        begin = {
            "start": self._start,
            "epoch": 0 if epoch is None else epoch.number,
            "members": list(ranks if epoch is None else epoch.members),
            "rank": context.rank,
            "replica": context.data_parallel_rank,
            "replicas": context.data_parallel_size,
            "split": context.plan.split != "by_feature",
            "round": round,
            "at": _plain(self._at),
            "samples": self._feed.batches.samples,
            "pid": os.getpid(),
            "host": context.process.host,
            "why": "" if epoch is None else epoch.why,
            "time_s": time.time(),
        }
        self._add({"begin": begin})

    def _add(self, line: dict[str, Any]) -> None:
        self._write(json.dumps(line).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        """What cannot be written waits for the next line."""
        self._unwritten += line
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[os.write(fd, self._unwritten) :]
            finally:
                os.close(fd)


def _plain(at: Position) -> list[int]:
    return [at.epoch, at.offset, at.steps]
