"""Rank ledger: the steps that one rank has computed, and its pushes that servers acknowledged.

Kept where `manyhands chaos` watches the run, and written to RUN/ledger/rank-<r>.<n>.json when the
process ends, but for kill -9; n counts the processes of a rank. It is no part of the events: those
stop where a disk is full.

    steps          [epoch, first step, step after the last, samples] of each round
    rounds_s       when each round ended, seconds since 1970
    acknowledged   pushes of this rank, by shard
    applied        pushes of all ranks, by shard, counted there; a commit counts as one
    steps_applied  steps of all ranks, by shard, counted there, where they are elastic
    ended_at       the step up to which all ranks have computed

Of runs without servers: see `round_log`.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.assembly.chaos.round_log import FOLDER, RoundLog
from manyhands.assembly.data import Feed, claiming_word
from manyhands.assembly.rank_context import RankContext
from manyhands.core import Position, TableStore
from manyhands.errors import PlanError
from manyhands.launch import environment
from manyhands.server.client.server_store import ServerStore
from manyhands.split.data import StepSamples
from manyhands.task import Callback


def ledgers(context: RankContext, feed: Feed, store: TableStore | None) -> tuple[Callback, ...]:
    """The ledger of this rank, where somebody wants it."""
    if environment.chaos() is None:
        return ()
    if (word := claiming_word(context.plan)) and context.plan.servers == 0:
        raise PlanError(
            f"manyhands chaos compares the rounds that all ranks make together, and under {word} "
            "each rank makes its own; use merge=all_reduce"
        )
    if context.plan.servers == 0:
        return (RoundLog(context, feed),)
    return (RankLedger(context, feed, _server_store(store)),)


def _server_store(store: Any) -> ServerStore | None:
    """The store that counts pushes, inside those that wrap it."""
    while store is not None and not isinstance(store, ServerStore):
        store = getattr(store, "store", None)
    return store


class RankLedger(Callback):
    def __init__(self, context: RankContext, feed: Feed, store: ServerStore | None):
        self._context, self._feed, self._store = context, feed, store
        self._at: Position = feed.batches.position
        self._steps: list[tuple[int, int, int, int]] = []
        self._rounds_s: list[float] = []
        if feed.claims is not None:
            feed.claims.on_step = self._claimed

    def _claimed(self, step: StepSamples) -> None:
        """An asynchronous rank computes a step now: its position moves at sync points only."""
        at, samples = step.position, sum(map(len, step.micros))
        self._steps.append((at.epoch, at.steps, step.after.steps, samples))

    def on_round(self, run: Any, round: int, loss: Tensor) -> None:
        self._rounds_s.append(time.time())
        if self._feed.claims is not None:
            return
        before, self._at = self._at, self._feed.batches.position
        known = self._feed.batches.samples is not None
        limits, total = self._feed.limits, self._feed.batches.total
        samples = limits.samples_between(before, self._at) if known else total
        self._steps.append((before.epoch, before.steps, self._at.steps, samples))

    def on_end(self, run: Any) -> None:
        """All ranks have flushed their pushes, so what is applied is final."""
        self._write(run, "", applied=True)

    def on_failure(self, run: Any, error: BaseException) -> None:
        self._write(run, f"{type(error).__name__}: {error}", applied=False)

    def _write(self, run: Any, failure: str, applied: bool) -> None:
        found: dict[str, Any] = {
            "rank": self._context.rank,
            "size": self._context.process.size,
            "steps": self._steps,
            "rounds_s": self._rounds_s,
            "ended_at": self._feed.batches.position.steps,
            "metrics": dict(run.trainer.metrics),
            "failure": failure,
        }
        if self._store is not None:
            found |= self._store.push_counts(applied and self._context.leads)
        folder = Path(self._context.directory) / FOLDER
        with contextlib.suppress(OSError):  # `manyhands chaos` says that it is missing
            folder.mkdir(exist_ok=True)
            before = len(list(folder.glob(f"rank-{self._context.rank}.*.json")))
            path = folder / f"rank-{self._context.rank}.{before}.json"
            path.write_text(json.dumps(found))
