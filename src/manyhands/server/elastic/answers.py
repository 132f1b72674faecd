"""Requests of elastic workers to the coordinator, and their answers."""

from __future__ import annotations

from typing import Any

from manyhands.server.elastic.members import ElasticMembers
from manyhands.server.protocol import elastic_messages as em
from manyhands.server.protocol import messages as m


def answer_elastic(members: ElasticMembers, worker: int, x: Any, number: int) -> m.Message | None:
    """`number` is that of the request, which a repeated one has again. None: it is not ours."""
    match x:
        case em.LeaseStep():
            lease = members.lease(worker, x.limit, x.done, x.note, number, x.timeout_s)
            return em.StepLeased(*lease, members.news[x.news :], members.running())
        case em.Gather():
            return em.GatherAnswer(
                members.gather(worker, (x.sync, x.number), x.payload, timeout_s=x.timeout_s)
            )
        case em.GetNote():
            return em.Note(*members.note(worker, x.timeout_s))
        case em.RequestLeaseSync():
            members.request_sync(worker)
            return m.Done()
    return None
