"""Step leases of a rank: where its steps come from, and how it tells the run's state to others."""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Event
from manyhands.launch import environment
from manyhands.launch.elastic.worker_replacements import tell
from manyhands.server.elastic.client import ElasticClient


class StepLeases:
    """What `StepClaims` leases its steps from. With the first request after a sync point it sends a
    note of the run's state (`make_note`), for a process that may have to replace another."""

    def __init__(self, context: RankContext, client: ElasticClient):
        self.client, self._context = client, context
        self.make_note: Callable[[], bytes] | None = None
        self.sync_at: int | None = None  # where the last answer was a sync point
        self._unsent = True
        self._again = self._computes_again = False
        # by this the launcher knows which of its processes a lost one is
        key = f"incarnation/{context.rank}/{environment.starts()}"
        tell(context.store, key, client.incarnation)

    @property
    def alone(self) -> bool:
        """Whether a block of steps, pushed as one sum, must end here: before and after a step that
        a dead worker held."""
        return self._again or self._computes_again

    def claim_step(self, limit: int) -> int | None:
        note = self.make_note() if self._unsent and self.make_note is not None else None
        leased = self.client.lease(limit, note)
        self._unsent = leased.sync_at is not None
        self._again, self.sync_at = leased.again, leased.sync_at
        self._context.follow(self.client.running)
        self._tell()
        return leased.step

    def _tell(self) -> None:
        """Tell the launcher who is lost, which may be a process that hangs; and if this rank leads,
        everybody."""
        news, self.client.news = self.client.news, []
        for kind, who, text in news:
            if kind == "lost":
                tell(self._context.store, f"lost/{who}")
            if self._context.leads:
                rank, at = self._context.rank, self._context.group.round
                event = Event(time.time(), rank, at, f"worker {kind}", value=text)
                self._context.recorder.emit(event)

    def begin(self, step: int) -> None:
        """This rank computes a step now."""
        self.client.steps.begin(step)
        self._computes_again, self._again = self._again, False
