"""Messages about tables of clients that come and go: list them, delete rows, drop whole tables."""

from __future__ import annotations

from manyhands.core import Table
from manyhands.server.protocol.messages import ArraySpec, Message

ANYBODY = -1  # as the worker of a deletion that is part of a copy: it is not counted


class ListTables(Message):
    name: str | None = None  # None: all


class StoredPart(Message):
    """A table, and what of it one shard stores."""

    table: Table
    rows: int  # elements of a dense one
    nbytes: int


class TableList(Message):
    tables: list[StoredPart]


class DeleteRows(Message):
    """Delete rows with their optimizer state, exactly once; their `ids` follow. The server fills in
    whose request it is."""

    table: str
    epoch: int
    sequence: int  # of the same count as pushes
    arrays: list[ArraySpec]
    worker: int = ANYBODY
    incarnation: int = 0


class DropTable(Message):
    """Delete a whole table, exactly once."""

    table: str
    sequence: int
    arrays: list[ArraySpec]  # none
    worker: int = ANYBODY
    incarnation: int = 0


class StartTable(Message):
    """Answered with 1 where this run has begun the table already, with 2 where a run before it in
    the namespace left it on the servers, else with 0."""

    name: str
    there: bool  # on a server
