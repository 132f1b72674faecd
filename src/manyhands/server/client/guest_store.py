"""Guest store: a client of servers that is no rank of a run; nobody waits for it.

It may come and go at any time, also by kill -9. Tables outlive it, and it sees those that others
have made.
"""

from __future__ import annotations

import ssl
import time

import numpy as np
from torch import Tensor

from manyhands.core import Table, Tensors
from manyhands.errors import StoreError
from manyhands.server.client.dial import Transport
from manyhands.server.client.server_store import ServerStore
from manyhands.server.client.table_requests import delete_rows, drop_table, list_tables
from manyhands.server.protocol import messages as m
from manyhands.server.protocol.arrays import pack
from manyhands.server.protocol.table_messages import StoredPart
from manyhands.server.table_content import Arrays, first_values, slice_of
from manyhands.server.validate import ids_of

LOOK_EVERY_S = 0.02
MAKER_S = 5.0  # for another client to finish a table that it has begun


class GuestStore(ServerStore):
    """`namespace` is that whose run's figures `stats` shows; names of tables are as given."""

    def __init__(
        self,
        coordinator: str,
        token: str = "",
        *,
        namespace: str = "",
        timeout_s: float = 60.0,
        transport: Transport = "auto",
        tls: ssl.SSLContext | None = None,
    ):
        super().__init__(
            coordinator,
            0,
            1,
            token,
            timeout_s=timeout_s,
            transport=transport,
            tls=tls,
            namespace=namespace,
            guest=True,
        )

    def stored(self) -> list[StoredPart]:
        with self._sender.lock:
            self._sender.check()
            found = list_tables(self._sender)
            self._router.tables = {part.table.name: part.table for part in found}
        return found

    def create(
        self, table: Table, values: Tensor | None = None, state: Tensors | None = None
    ) -> None:
        """Two clients may create the same table at once: who makes it on the first shard makes it
        on all, so that a dense one starts from the values of one of them."""
        with self._sender.lock:
            self._sender.check()
            vector = first_values(table, values, state)
            if not self._make_on(0, table, vector, state):
                self._await_maker(table)
            for shard in range(1, len(self._sender.connections)):
                self._make_on(shard, table, vector, state)
            self._router.tables[table.name] = table

    def _make_on(
        self, shard: int, table: Table, vector: Tensor | None, state: Tensors | None
    ) -> bool:
        span, content = None, Arrays()
        if table.length is not None:
            span = self._router.ranges(table)[shard]
            if vector is not None:
                content["values"] = vector.numpy()[span[0] : span[1]]
            for name, x in (state or {}).items():
                content[f"state/{name}"] = slice_of(table, x, span)
        described, parts = pack(content)
        asked = m.CreateTable(table, span, described)
        made = self._sender.connections[shard].ask(asked, f"create of {table.name}", parts).value
        return bool(made)

    def _await_maker(self, table: Table) -> None:
        """Where it died on the way, this client makes the rest."""
        until = time.monotonic() + MAKER_S
        while time.monotonic() < until:
            if any(part.table.name == table.name for part in list_tables(self._sender)):
                return
            time.sleep(LOOK_EVERY_S)

    def delete(self, name: str, ids: Tensor) -> int:
        table = self._router.table(name)
        if table.length is not None:
            raise StoreError(f"table {name!r} is dense: it has no rows to delete; drop it")
        numbers: np.ndarray = ids_of(table, ids)
        self._sender.check()
        return delete_rows(self._sender, name, numbers)

    def drop(self, name: str) -> bool:
        self._sender.check()
        return drop_table(self._sender, name)
