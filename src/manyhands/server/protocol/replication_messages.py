"""Messages between servers, which keep copies of each other's shards, and from operators."""

from __future__ import annotations

from manyhands.server.protocol.messages import (
    ArenaRange,
    ArraySpec,
    Commits,
    Message,
    PushMessage,
    TableRequest,
)

# -- replication --


class Follow(Message):
    """The sender hands the changes of this shard on from now on. Answered by Done(changes here)."""

    server: int  # the sender's number
    version: int  # of the chain
    copy: int = 0  # not 0: the content comes first, forget what is here. The how manieth copy


class Forward(Message):
    """Change `number` of a shard: commits, then a push, then what a worker remembers. Payload: of
    each pushed table its ids and updates, as they are. Answered by Done(changes acknowledged)."""

    number: int
    worker: int
    incarnation: int
    sequence: int
    push: list[TableRequest]
    options: PushMessage | None
    commits: Commits
    pulled: dict[str, int]  # by table: the version that the worker pulled
    remember: list[str]  # tables whose values the worker pulls now, see core.Store.pull
    arena: ArenaRange | None = None  # where the payload is, in shared memory


class ForwardTable(Message):
    """Change `number` of a shard (0: part of a copy): a CreateTable, RestoreTable, DeleteRows or
    DropTable, with its payload."""

    number: int
    kind: int
    body: bytes
    arena: ArenaRange | None = None


class EraseRows(Message):
    """Erase rows of a table; their ids are the payload."""

    name: str
    arrays: list[ArraySpec]


class CopyState(Message):
    """Ends a copy: all that is not rows. The copy has the changes up to `number`."""

    number: int
    committed: dict[int, int]  # by run
    version: int
    tables: dict[str, list[int]]  # version and optimizer step
    pulled: list[tuple[int, str, int]]
    arrays: list[ArraySpec]  # dedup marks, pending pushes, what workers remember


class Copied(Message):
    """The learner of this shard has everything that its last member has."""

    shard: int
    learner: int
    seconds: float = 0.0
    nbytes: int = 0


class Part(Message):
    """A server lacks changes of this shard that nobody keeps any more: it needs a new copy."""

    shard: int
    server: int


class Loads(Message):
    """From a server, now and then: rows a second that workers ask for, by shard."""

    rates: dict[int, float]


# -- operators --


class GetStatus(Message):
    pass


class ServerStatusReply(Message):
    """What `manyhands servers RUN status` shows, as JSON."""

    text: str


class Drain(Message):
    """Move everything away from this server, then let it end."""

    server: int


class Rebalance(Message):
    """Move shards to the servers that have the least load."""
