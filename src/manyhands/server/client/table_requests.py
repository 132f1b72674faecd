"""Table requests: list the tables of all shards, delete rows, drop tables."""

from __future__ import annotations

import time

import numpy as np

from manyhands.errors import StoreError
from manyhands.server.client.connection import Connection
from manyhands.server.client.pending_request import Parts, PendingRequest
from manyhands.server.client.request_sender import RequestSender
from manyhands.server.namespaces.table_list import total_of
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import table_messages as t
from manyhands.server.protocol.arrays import pack

IN_THIS_RUN, LEFT_BY_A_RUN = 1, 2  # answers to StartTable


def list_tables(sender: RequestSender) -> list[t.StoredPart]:
    with sender.lock:
        asked = [c.ask(t.ListTables(), "list of tables").tables for c in sender.connections]
    return total_of(asked)


def drop_table(sender: RequestSender, name: str) -> bool:
    """Whether there was such a table, anywhere."""
    with sender.lock:
        sender.flush()
        there = [
            connection.ask(t.DropTable(name, sender.take_sequence(s), []), f"drop of {name}").value
            for s, connection in enumerate(sender.connections)
        ]
        sender.router.tables.pop(name, None)
    return any(there)


def delete_rows(sender: RequestSender, name: str, ids: np.ndarray) -> int:
    """How many rows there were. Every shard gets the ids that the slot map gives to it; where the
    map changed meanwhile, all are asked once more."""
    distinct, deleted = np.unique(ids), 0
    with sender.lock:
        sender.flush()  # a push before it must not come after it
        while True:
            generation, posted = sender.generation, []
            for s, connection in enumerate(sender.connections):
                pending = _Deletion(sender, s, name, distinct)
                connection.settle(lambda: f"deletion of rows of {name}")
                posted.append((connection, connection.post(pending)))
            for connection, sent in posted:
                connection.wait(sent)
                deleted += sent.answer.value
            if sender.generation == generation:
                return deleted


class _Deletion(PendingRequest):
    """Composed by the slot map of the moment, each time that it is sent."""

    def __init__(self, sender: RequestSender, shard: int, name: str, ids: np.ndarray):
        super().__init__(
            f"deletion of rows of {name}", self._request, time.monotonic() + sender.timeout_s
        )
        self._sender, self._shard, self._name, self._ids = sender, shard, name, ids
        self._sequence = sender.take_sequence(shard)

    def _request(self) -> tuple[m.Message, Parts]:
        slots = self._sender.router.slots
        mine = self._ids[slots.shard_of(self._name, self._ids) == self._shard]
        described, parts = pack({"ids": mine})
        return t.DeleteRows(self._name, slots.epoch, self._sequence, described), parts


def start_table(control: Connection, sender: RequestSender, name: str) -> None:
    """Make room for a table that a run creates: what the run before it in the namespace left under
    that name is dropped, and what a store made is refused: it is somebody's."""
    there = bool(sender.connections[0].ask(t.ListTables(name), f"create of {name}").tables)
    answer = control.ask(t.StartTable(name, there), f"create of {name}").value
    if answer == LEFT_BY_A_RUN:
        drop_table(sender, name)
    elif answer != IN_THIS_RUN and there:
        raise StoreError(
            f"table {name!r} is on the servers already, and no run made it; a run starts its "
            "tables anew: drop it with mh.Store(...).drop_table, or give the run another "
            "namespace, MANYHANDS_NAMESPACE=NAME"
        )
