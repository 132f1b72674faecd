"""Messages of elastic workers, which lease their steps from the coordinator."""

from __future__ import annotations

from manyhands.server.protocol.messages import Message


class LeaseStep(Message):
    """Steps that are done, and a request for one more; see `elastic.step_ledger`."""

    limit: int
    done: list[int]
    note: bytes | None  # in the first request after a sync point; see `elastic.members`
    news: int  # how many sentences this worker has
    timeout_s: float


class StepLeased(Message):
    step: int | None
    again: bool
    sync_at: int | None
    # kind, rank/incarnation and sentence of those that the worker does not have
    news: list[tuple[str, str, str]]
    running: list[int]  # live workers


class Gather(Message):
    sync: int
    number: int
    payload: bytes
    timeout_s: float


class GatherAnswer(Message):
    payloads: dict[int, bytes]  # by worker


class GetNote(Message):
    timeout_s: float


class Note(Message):
    syncs: int  # sync points so far
    news: int  # how many sentences are from before this process
    note: bytes


class RequestLeaseSync(Message):
    pass
