"""What is said between workers, servers and the coordinator: one small typed message (msgspec) a frame, before raw numbers.

    stranger -> anyone      Hello (a nonce) . Proof (who, and a code that only the token can make) . Welcome, or Refused with a reason
    worker -> shard         Create, Exchange (push and pull, all tables at once), Dump, Load, Ask;  Attach: here is shared memory
    shard -> worker         Rows, Done, Failed (this request, the connection goes on), Again (send it once more, and how)
    server -> coordinator   Register, Ready;                                    back: Assign (the slot map)
    worker -> coordinator   Enter, Advance (a tick), Deal, Start, Call, Made, Await, Ping, Leave;   back: Assign, Advanced, Dealt, Done, Failed

Frames that follow each other on a connection are numbered. A shard that cannot serve number n as it came (it does not know the key
list, or has another slot map) answers Again and ignores all that follows until Resume, after which the worker sends n and what came
after it once more: so order is kept.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.core import Table

Code = Literal["none", "bf16", "fp16", "int8"]  # how rows and updates are written on the way
ALL, IDS, KNOWN = (
    0,
    1,
    2,
)  # where the ids of a part are: it is dense; in the payload; the shard has kept them under their hash


class Message(msgspec.Struct, array_like=True):
    pass


# -- the handshake --


class Hello(Message):
    nonce: bytes


class Proof(Message):
    nonce: bytes
    role: Literal["data", "control", "lease", "server"]
    shard: int  # of this server
    worker: int
    incarnation: int
    code: bytes


class Welcome(Message):
    code: bytes  # proves that this side knows the token too
    instance: int  # a number that a server draws when it starts


class Refused(Message):
    reason: str  # a word, as counted: token, version, garbage, size, slow, crowd
    text: str


# -- answers --


class Done(Message):
    value: int = 0


class Failed(Message):
    kind: Literal["store", "finite", "peer", "internal"]  # finite: the updates are not
    text: str
    ranks: list[int] = []  # msgspec copies it


class Again(Message):
    reason: Literal["keys", "epoch"]
    epoch: int = 0


class Resume(Message):
    """From here on it is new again."""


class RowsReply(Message):
    """They follow, or are in shared memory where they were asked for."""

    version: int  # of the shard, when it was read
    applied: bool  # False: the push had been here before


# -- data --


class Keyed(Message):
    table: str
    count: int  # rows, or elements of a dense part
    mode: int = ALL
    key: int = 0  # hash of the ids
    room: tuple[int, int] | None = (
        None  # segment and place of its updates, where they stand apart from the rest of the payload
    )


class How(Message):
    """The words of one push; see `core.Store.push`."""

    clock: int = 0
    lr: float | None = None
    pending: bool = False
    weight: float | None = None
    adapt: bool = False
    compensate: float | None = None
    decay: float | None = None


Commits = list[tuple[int, list[tuple[int, int]]]]


class ArenaRange(Message):
    """Where payload and answer of a request are in shared memory."""

    segment: int
    at: int
    nbytes: int
    answer_at: int
    answer_bytes: int


class Exchange(Message):
    """Payload: of each pushed part ids (mode IDS) and updates, then the ids (mode IDS) of each wanted one, each begins at a
    multiple of `wire.ALIGN`."""

    epoch: int
    sequence: int
    push: list[Keyed]
    pull: list[Keyed]
    how: How | None = None
    code: Code = "none"
    remember: bool = False
    commits: Commits = []  # msgspec copies it
    place: ArenaRange | None = None


class Array(Message):
    """One array of a payload."""

    name: str
    dtype: str
    shape: list[int]


class Create(Message):
    table: Table
    part: tuple[int, int] | None
    arrays: list[Array]  # values, state/NAME


class Dump(Message):
    name: str


class Content(Message):
    arrays: list[Array]


class Load(Message):
    name: str
    clear: bool  # what is there first
    arrays: list[Array]


class Ask(Message):
    what: Literal["stats"]


class Told(Message):
    numbers: dict[str, float]


class Attach(Message):
    segment: int
    nbytes: int
    drop: list[int]  # of older segments, which nothing under way needs


# -- the coordinator --


class Where(Message):
    """A shard: how to reach its server, and which of the server's shards it is."""

    host: str
    port: int
    shard: int = 0
    local: str = ""  # a unix socket
    machine: str = ""  # who has the same can reach it

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Register(Message):
    shards: list[Where]


class Ready(Message):
    epoch: int


class Assign(Message):
    epoch: int
    owner: bytes  # uint16 a slot
    shards: list[Where]
    incarnation: int = 0  # what follows is for a worker that enters
    clock: int = 0
    version: int = 0  # commits so far
    lease_s: float = 10.0


class Enter(Message):
    size: int
    incarnation: int | None  # None: a new process; else the one that was given before


class Advance(Message):
    clock: int
    staleness: float
    quorum: int | None
    late: Literal["drop", "keep"]
    delay: int | None
    held: bool
    version: int  # the last commit that this worker knows
    timeout_s: float


class Advanced(Message):
    clock: int
    counted: bool
    version: int
    commits: Commits


class ClaimStep(Message):
    limit: int
    shared: bool


class StepClaimed(Message):
    step: int | None


class Start(Message):
    base: int


class RequestSync(Message):
    pass


class Made(Message):
    name: str


class Await(Message):
    """Answered when rank 0 has made the table."""

    name: str
    timeout_s: float


class Ping(Message):
    pass


class Leave(Message):
    pass


KINDS: dict[int, type[Message]] = dict(
    enumerate(
        [
            Hello, Proof, Welcome, Refused, Done, Failed, Again, Resume, RowsReply, Exchange, Create, Dump, Content, Load, Ask, Told, Attach,
            Register, Ready, Assign, Enter, Advance, Advanced, ClaimStep, StepClaimed, Start, RequestSync, Made,
            Await, Ping, Leave,
        ],
        start=1,
    )
)  # fmt: skip
KIND_OF: dict[type[Message], int] = {kind: number for number, kind in KINDS.items()}
