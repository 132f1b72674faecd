"""Messages about hot rows, which are copied to all servers: see `hot_copies`."""

from __future__ import annotations

from manyhands.server.protocol.messages import ArraySpec, Message


class CopyReads(Message):
    """Reads of copies of one table."""

    table: str
    ids: list[int]
    counts: list[int]
    workers: list[int]  # who read


class FetchHot(Message):
    """From server to server: send the hot rows of the shards that you lead."""

    reads: list[CopyReads]  # of copies, since the last


class HotContent(Message):
    """Hot rows by table: arrays `ids/TABLE` and `rows/TABLE`."""

    epoch: int  # of the slot map
    arrays: list[ArraySpec]


class ListHot(Message):
    """From a worker to a shard: of which rows has your server copies?"""


class HotList(Message):
    tables: dict[str, list[int]]  # ids
