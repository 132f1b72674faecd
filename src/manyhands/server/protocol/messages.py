"""Messages of the parameter server's protocol: one typed message (msgspec) in every frame.

    handshake               Hello, Proof, Welcome or Refused                     (see `handshake`)
    worker -> shard         CreateTable, Exchange (push and pull of all tables at once), DumpTable,
                            RestoreTable, GetStats, Attach (shared memory), Resume; BeginSnapshot,
                            GetSnapshot, FetchSnapshot, EndSnapshot; of guests also ListTables,
                            DeleteRows, DropTable (see `table_messages`)
    shard -> worker         RowsReply, TableContent, Stats, Done, Failed, Resend; SnapshotState,
                            SnapshotPart; TableList
    server -> coordinator   Register, Ready, Copied, Ping
    coordinator -> server   AssignSlots (the slot map), Leave (the run is over)
    server -> server        Follow, then Forward, ForwardTable, CopyState (see `replication`)
    worker -> coordinator   Join, TickClock, ClaimStep, RequestSync, StartTable, TableCreated,
                            AwaitTable, GetSlotMap, GetStats, Ping, Leave (elastic workers: see
                            `elastic_messages`)
    coordinator -> worker   AssignSlots, ClockTicked, StepClaimed, Stats, Done, Failed
    operator -> coordinator GetStatus, Drain, Rebalance

Frames of a connection are numbered. A shard that cannot serve request n as it came (it does not
know the key list, or has another slot map) answers Resend and ignores all that follows until
Resume. The worker then sends n and all requests after it once more, so their order is kept.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.core import Table

RowCodec = Literal["none", "bf16", "fp16", "int8"]  # how a frame encodes rows and updates
# Where the ids of a table are: it is dense and has none; in the payload; the shard has kept them
# under their hash.
DENSE, IDS_SENT, IDS_KNOWN = 0, 1, 2
RUN_BITS = 20  # of a worker's number, that are its rank; those above are the number of its run


class Message(msgspec.Struct, array_like=True):
    """Base of all messages; encoded as an array of its fields."""


# -- handshake --


class Hello(Message):
    nonce: bytes


class Proof(Message):
    """Who connects, and a code that only someone with the token can make."""

    nonce: bytes
    role: Literal["data", "control", "heartbeat", "server", "replica", "operator"]
    shard: int  # of the run
    worker: int
    incarnation: int
    code: bytes


class Welcome(Message):
    code: bytes  # proves that the server knows the token too
    instance: int  # a random number of this server process


class Refused(Message):
    reason: str  # the name of a counter: token, version, garbage, size, slow, crowd
    text: str


# -- replies --


class Done(Message):
    value: int = 0


class Failed(Message):
    """This request failed; the connection goes on."""

    # finite: updates that are not finite; evicted: the worker was taken for dead
    kind: Literal["store", "finite", "peer", "internal", "evicted"]
    text: str
    ranks: list[int] = []  # msgspec copies it


class Resend(Message):
    """Send this request and all after it once more."""

    reason: Literal["keys", "epoch"]  # an unknown key list, or another slot map
    epoch: int = 0


class Resume(Message):
    """The requests that follow are those to serve."""


class RowsReply(Message):
    """Acknowledges an Exchange. Its rows follow, or are in shared memory where asked for."""

    version: int  # of the shard, when it was read
    applied: bool  # False: the push had been applied before


# -- data --


class TableRequest(Message):
    """One table's part of an Exchange."""

    table: str
    count: int  # rows, or elements of a dense part
    mode: int = DENSE
    key: int = 0  # hash of the ids
    # segment and offset of its updates, where they are not with the rest of the payload
    updates_at: tuple[int, int] | None = None


class PushMessage(Message):
    """Clock and options of one push; see `core.PushOptions`."""

    clock: int = 0
    lr: float | None = None
    pending: bool = False
    weight: float | None = None
    adapt: bool = False
    compensate: float | None = None
    decay: float | None = None
    # of elastic workers: the steps it sums up, and a step below which all are done
    steps: list[int] = []  # msgspec copies it
    done_below: int = 0


Commits = list[tuple[int, list[tuple[int, int]]]]  # version, (worker, clock) in rank order


class ArenaRange(Message):
    """Where payload and answer of a request are in shared memory."""

    segment: int
    at: int
    nbytes: int
    answer_at: int
    answer_bytes: int


class Exchange(Message):
    """Commit, then push, then pull, each optional.

    Payload: for each pushed table its ids (IDS_SENT) and updates, then for each pulled table its
    ids (IDS_SENT). Each array begins at a multiple of `frame.ALIGN`.
    """

    epoch: int
    sequence: int
    push: list[TableRequest]
    pull: list[TableRequest]
    options: PushMessage | None = None  # None: no push
    codec: RowCodec = "none"
    remember: bool = False
    commits: Commits = []  # msgspec copies it
    arena: ArenaRange | None = None


class ArraySpec(Message):
    """Name, dtype and shape of one array of a payload."""

    name: str
    dtype: str
    shape: list[int]


class CreateTable(Message):
    table: Table
    span: tuple[int, int] | None  # the range of a dense table that the shard stores
    arrays: list[ArraySpec]  # values, state/NAME


class DumpTable(Message):
    name: str
    start: int = 0  # where this piece of it begins: 0, then what the piece before said
    nbytes: int = 1 << 22  # of a piece, about


class TableContent(Message):
    arrays: list[ArraySpec]
    stop: int = -1  # where the next piece begins; -1: there is none


class RestoreTable(Message):
    name: str
    clear: bool  # empty the table first
    arrays: list[ArraySpec]
    more: bool = False  # parts of long arrays: others follow, and only then the table is loaded


class GetStats(Message):
    pass


class Stats(Message):
    numbers: dict[str, float]


class Attach(Message):
    """Map a segment of shared memory; its file descriptor follows."""

    segment: int
    nbytes: int
    drop: list[int]  # older segments that no request uses any more


# -- coordinator --


class ShardAddress(Message):
    """How to reach a shard: the address of its server, and the shard's number in the run."""

    host: str  # "": no server has this shard any more
    port: int
    shard: int = 0
    local: str = ""  # a unix socket
    machine: str = ""  # processes with the same value can reach the unix socket

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Register(Message):
    """A server, or one that lost its connection to the coordinator and comes back."""

    where: ShardAddress
    shards: int  # that it can be the first to hold
    instance: int  # a random number of the process
    pid: int = 0
    memory_bytes: int | None = None  # of each shard
    extra: bool = False  # beside those that the coordinator was started for


class ServerEntry(Message):
    number: int  # never given twice
    where: ShardAddress


class ShardChain(Message):
    """The servers that hold one shard, by number. The first serves workers and hands every change
    on; the last acknowledges it. Counts as another chain (`version`) when its members change."""

    version: int
    members: list[int]  # []: the shard is lost
    learner: int = -1  # gets a copy from the last member, and will then be one
    leaving: int = -1  # stays until the learner is a member
    life: int = 0  # how often the content was lost


class Ready(Message):
    """The server uses the slot map of this epoch."""

    epoch: int


class AssignSlots(Message):
    """The slot map; to a worker that joins, also its place in the run."""

    epoch: int
    owner: bytes  # uint16 per slot
    shards: list[ShardAddress]  # where workers reach each
    servers: list[ServerEntry] = []
    chains: list[ShardChain] = []
    ack: Literal["all", "primary"] = "all"  # who has a push when it is acknowledged
    you: int = -1  # the number of the server that gets this
    memory_bytes: int | None = None  # of each shard
    incarnation: int = 0  # this and what follows: for a worker that joins
    clock: int = 0
    version: int = 0  # commits so far
    lease_s: float = 10.0
    recovers: bool = False  # a coordinator that is gone will be back
    worker: int = 0  # its number among the workers of all runs on the servers
    commits: Commits = []  # those that shards may not have yet, to a process that replaces another


class Join(Message):
    size: int
    incarnation: int | None  # None: a new process; else the one that was assigned before
    lease_s: float | None = None  # None: as the coordinator was started
    namespace: str = ""
    guest: bool = False  # no rank of a run: nobody waits for it
    elastic: bool = False  # workers may be replaced, and lease their steps


class TickClock(Message):
    clock: int
    staleness: float
    quorum: int | None
    late: Literal["drop", "keep"]
    delay: int | None
    pending: bool
    version: int  # the last commit that this worker knows
    timeout_s: float


class ClockTicked(Message):
    clock: int
    counted: bool
    version: int
    commits: Commits


class ClaimStep(Message):
    limit: int
    shared: bool


class StepClaimed(Message):
    step: int | None


class RequestSync(Message):
    pass


class TableCreated(Message):
    name: str


class AwaitTable(Message):
    """Answered when rank 0 has created the table."""

    name: str
    timeout_s: float


class Ping(Message):
    pass


class Leave(Message):
    pass


class GetSlotMap(Message):
    pass


class BeginSnapshot(Message):
    """Begin to save tables as they are now; see `snapshots.shard_snapshot`."""

    tag: str
    names: list[str]
    folder: str
    base: str
    incremental: bool
    shard: int
    shards: int


class GetSnapshot(Message):
    tag: str


class SnapshotState(Message):
    """How far a snapshot is."""

    direct: bool = True  # the shard sees the folder
    done: bool = False
    failure: str = ""  # why it was not begun, or failed
    not_finite: bool = False
    files: list[tuple[str, int, str]] = []  # name, bytes, sha256; msgspec copies it


class FetchSnapshot(Message):
    tag: str
    name: str
    at: int
    nbytes: int


class SnapshotPart(Message):
    """Bytes of a file; they are the payload."""

    nbytes: int


class EndSnapshot(Message):
    tag: str
    good: bool
