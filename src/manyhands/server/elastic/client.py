"""Elastic client: a worker's side of leases, gatherings and notes, over its store's connection."""

from __future__ import annotations

from manyhands.server.client.server_store import SLACK_S, ServerStore
from manyhands.server.elastic.computed_steps import ComputedSteps
from manyhands.server.elastic.gatherings import START
from manyhands.server.protocol import elastic_messages as em


class ElasticClient:
    """`store` was opened with `elastic=True`."""

    def __init__(self, store: ServerStore, marks: bool = True):
        self._store = store
        self.steps = store.steps = ComputedSteps(marks)
        self.incarnation = store.incarnation
        self.replaces = store.incarnation > 0  # this process replaces one that died
        self.news: list[tuple[str, str, str]] = []  # that nobody has read yet
        self.running: list[int] = list(range(store.size))  # live workers, as far as is known
        self._news, self._syncs, self._gathered = 0, START, 0

    def lease(self, limit: int, note: bytes | None) -> em.StepLeased:
        """Report what is pushed, and get a step below `limit`; see `StepLedger.lease`."""
        store = self._store
        store.flush()  # a step is done when all shards have its push
        leased: em.StepLeased = store.ask(
            em.LeaseStep(limit, self.steps.done(), note, self._news, store.timeout_s),
            "step lease",
            store.timeout_s + SLACK_S,
        )
        self._news += len(leased.news)
        self.news += leased.news
        self.running = leased.running
        if leased.sync_at is not None:
            self.steps.done_below = leased.sync_at
            self._syncs, self._gathered = self._syncs + 1, 0
        return leased

    def gather(self, payload: bytes) -> dict[int, bytes]:
        """By worker: what each live one brings to this gathering; see `Gatherings`."""
        store, number = self._store, self._gathered
        self._gathered += 1
        answer: em.GatherAnswer = store.ask(
            em.Gather(self._syncs, number, payload, store.timeout_s),
            "gathering",
            store.timeout_s + SLACK_S,
        )
        self.running = sorted(answer.payloads)
        return answer.payloads

    def note(self) -> bytes:
        """For a process that replaces another: what the workers know."""
        store = self._store
        answer: em.Note = store.ask(
            em.GetNote(store.timeout_s), "state of the run", store.timeout_s + SLACK_S
        )
        self._syncs, self._news = answer.syncs - 1, answer.news
        return answer.note

    def request_sync(self) -> None:
        self._store.ask(em.RequestLeaseSync(), "sync request", None)
