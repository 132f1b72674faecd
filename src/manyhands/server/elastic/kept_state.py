"""State of elastic workers as plain values: their leases and notes outlive the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.server.elastic.gatherings import Gatherings
from manyhands.server.elastic.members import ElasticMembers
from manyhands.server.elastic.step_ledger import Held, Lease, StepLedger


def elastic_state(members: ElasticMembers) -> dict[str, Any] | None:
    """None: the run's workers lease no steps."""
    if not members.used:
        return None
    ledger, gatherings = members.ledger, members.gatherings
    return {
        "held": [
            [
                sorted(h.steps),
                h.period,
                None if h.last is None else [h.last[0], *h.last[1]],
                h.coming,
            ]
            for h in ledger.held
        ],
        "next": ledger.next,
        "returned": ledger.returned,
        "ends": ledger.ends,
        "sync_requested": ledger.sync_requested,
        "since": gatherings.since,
        "brought": [[list(key), of] for key, of in gatherings.brought.items()],
        "complete": [[list(key), of] for key, of in gatherings.complete.items()],
        "news": members.news,
        "notes": list(members.notes.items()),
        "heard": list(members.heard.items()),
        "entering": sorted(members.entering),
    }


def _last(held: Held) -> list[Any] | None:
    return None if held.last is None else [held.last[0], *held.last[1]]


def load_elastic(members: ElasticMembers, state: Mapping[str, Any] | None) -> None:
    if state is None:
        return
    members.used = True
    _load_ledger(members.ledger, state)
    _load_gatherings(members.gatherings, state)
    members.news = [(kind, who, text) for kind, who, text in state["news"]]
    members.notes = dict(state["notes"])
    members.heard = dict(state["heard"])
    members.entering = set(state["entering"])


def _load_ledger(ledger: StepLedger, state: Mapping[str, Any]) -> None:
    ledger.held = [
        Held(set(steps), period, None if last is None else (last[0], Lease(*last[1:])), coming)
        for steps, period, last, coming in state["held"]
    ]
    ledger.next, ledger.returned, ledger.ends = state["next"], state["returned"], state["ends"]
    ledger.sync_requested = state["sync_requested"]


def _load_gatherings(gatherings: Gatherings, state: Mapping[str, Any]) -> None:
    gatherings.since = state["since"]
    for name in ("brought", "complete"):
        setattr(gatherings, name, {(sync, number): of for (sync, number), of in state[name]})
