"""Messages about hot rows, which are copied to all servers: see `hot_copies`."""

from __future__ import annotations

from manyhands.server.protocol.messages import ArraySpec, Message


class FetchHot(Message):
    """From server to server: send the hot rows of the shards that you lead."""

    reads: list[tuple[str, list[int], list[int]]]  # of copies, since the last: table, ids, counts


class HotContent(Message):
    """Hot rows by table: arrays `ids/TABLE` and `rows/TABLE`."""

    epoch: int  # of the slot map
    arrays: list[ArraySpec]


class ListHot(Message):
    """From a worker to a shard: of which rows has your server copies?"""


class HotList(Message):
    tables: dict[str, list[int]]  # ids
