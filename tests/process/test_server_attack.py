"""Servers under attack: unauthenticated peers, garbage and dying clients.

The server counts them and keeps answering. A witness pushes and pulls during every attack, and
every answer it gets must be right.
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import torch
import torch.distributed as dist

from manyhands.core import ProcessInfo, Table
from manyhands.errors import ServerLost, StoreError
from manyhands.launch.servers import Servers, start
from manyhands.server.client.server_store import ServerStore
from manyhands.server.protocol import frame, handshake
from manyhands.server.protocol import messages as m
from support.commands import environ
from support.soak import Footprint

LIMIT_S = 60.0
SUM = Table("sum", dim=4, dtype="float64", optimizer="sum", init="zeros")


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    here = start(1, ProcessInfo(), dist.HashStore(), workers=2, timeout_s=LIMIT_S, env={})
    store = ServerStore(
        here.coordinator, 0, 2, here.token, timeout_s=LIMIT_S
    )  # once, so that all that is made once is there
    store.create(SUM)
    store.push({"sum": torch.tensor([1])}, {"sum": torch.zeros(1, 4, dtype=torch.float64)}).wait()
    store.close()
    yield here
    here.close()


class Witness:
    """A worker that does its work while others attack."""

    def __init__(self, servers: Servers):
        self.store = ServerStore(servers.coordinator, 0, 2, servers.token, timeout_s=LIMIT_S)
        self.store.create(SUM)
        self.ids = torch.arange(50)
        self.expected = self.store.pull({"sum": self.ids})["sum"]
        self.store.stats()  # what is told next was counted from here on
        self.rounds, self.failed = 0, ""
        self._refused: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self.store.push(
                    {"sum": self.ids}, {"sum": torch.ones(50, 4, dtype=torch.float64)}
                ).wait()
                self.expected = self.expected + 1
                assert torch.equal(self.store.pull({"sum": self.ids})["sum"], self.expected), (
                    "the sum is wrong"
                )
                self.rounds += 1
        except Exception as e:
            self.failed = f"{type(e).__name__}: {e}"

    def some_rounds(self) -> None:
        """It is answered now, too."""
        before = self.rounds
        until(lambda: self.rounds > before + 3 or bool(self.failed), "answer to the witness")
        assert not self.failed, self.failed

    def refused(self) -> dict[str, float]:
        """Since the witness came, by reason."""
        assert not self.failed, self.failed
        self._refused.update(
            {
                k.removeprefix("refused/"): n
                for k, n in self.store.stats().items()
                if k.startswith("refused/") and n
            }
        )
        return dict(self._refused)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.store.close()
        assert not self.failed, self.failed


@pytest.fixture
def witness(servers: Servers) -> Iterator[Witness]:
    """With a guard: after the attack the server holds no more threads and descriptors than before
    it.
    """
    pid = servers.children[0].process.pid
    before = Footprint.of(pid)
    watching = Witness(servers)
    try:
        yield watching
    finally:
        watching.close()
    assert servers.alive(), servers.fate()

    def recovered() -> bool:
        now = Footprint.of(pid)
        return now.threads <= before.threads and now.descriptors <= before.descriptors

    until(recovered, f"return to {before}", lambda: str(Footprint.of(pid)))


def until(what: Callable[[], bool], name: str, seen: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, f"no {name} within {LIMIT_S:g} s; {seen()}"
        time.sleep(0.01)


@contextmanager
def knock(servers: Servers) -> Iterator[socket.socket]:
    host, port = servers.coordinator.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as sock:
        yield sock


def greeted(sock: socket.socket) -> m.Hello:
    _, hello = frame.Channel(sock).receive(authenticated=False, deadline=time.monotonic() + LIMIT_S)
    assert isinstance(hello, m.Hello)
    return hello


def sent_away(sock: socket.socket) -> str:
    """The reason that the server gave before it closed."""
    channel = frame.Channel(sock)
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            _, answer = channel.receive(authenticated=False, deadline=deadline)
        except (frame.Closed, ConnectionError):
            return ""
        if isinstance(answer, m.Refused):
            return answer.reason


def raw_frame(
    kind: int = 2,
    message: bytes = b"",
    version: int = frame.VERSION,
    sizes: tuple[int, int] | None = None,
    magic: bytes = frame.MAGIC,
) -> bytes:
    """With a right checksum, whatever it says."""
    announced, payload = (len(message), 0) if sizes is None else sizes
    head = struct.pack("<4sHHIQQ", magic, version, kind, announced, payload, 0)
    return head + struct.pack("<I", zlib.crc32(head)) + message


PROOF = m.Proof(b"n" * 16, "data", 0, 1, 0, b"c" * 32)
KIND = frame.KIND_OF[m.Proof]


# -- unauthenticated peers --


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: there\r\n\r\n" + b" " * 64, "garbage"),
        (raw_frame(KIND, magic=b"nope"), "garbage"),
        (bytes(frame.HEADER_BYTES), "garbage"),
        (raw_frame(KIND)[:-1] + b"\xff", "garbage"),  # a wrong checksum
        (raw_frame(60000), "garbage"),  # no such kind
        (raw_frame(KIND, b"\xc1" * 100), "garbage"),  # no msgpack
        (
            raw_frame(KIND, msgspec.msgpack.encode([1, 2, 3])),
            "garbage",
        ),  # not the message of its kind
        (
            raw_frame(frame.KIND_OF[m.Exchange], msgspec.msgpack.encode([0, 0, [], []])),
            "garbage",
        ),  # asks before it proves
        (raw_frame(KIND, version=frame.VERSION + 1), "version"),
        (raw_frame(KIND, sizes=(2**32 - 1, 0)), "size"),
        (raw_frame(KIND, sizes=(10, 2**63)), "size"),
        (
            raw_frame(KIND, sizes=(frame.UNAUTHENTICATED_BYTES + 1, 0)),
            "size",
        ),  # allowed to friends only
        (frame.encode(PROOF), "token"),
    ],
)
def test_an_unauthenticated_peer_is_sent_away_with_a_reason_that_is_counted(
    servers: Servers, witness: Witness, sent: bytes, reason: str
) -> None:
    with knock(servers) as sock:
        greeted(sock)
        sock.sendall(sent)
        assert sent_away(sock) == reason
    witness.some_rounds()
    assert witness.refused() == {reason: 1.0}


def test_bytes_without_meaning_are_only_counted(servers: Servers, witness: Witness) -> None:
    chance = random.Random(0)
    for _ in range(200):
        with knock(servers) as sock:
            try:
                sock.sendall(chance.randbytes(chance.randrange(1, 2000)))
            except ConnectionError:
                pass  # it has heard enough
    until(
        lambda: sum(witness.refused().values()) == 200,
        "end of the unauthenticated connections",
        lambda: str(witness.refused()),
    )
    witness.some_rounds()


def test_a_proof_that_was_overheard_opens_nothing(servers: Servers, witness: Witness) -> None:
    with knock(servers) as sock:
        channel = frame.Channel(sock)
        hello = greeted(sock)
        proof = m.Proof(os.urandom(16), "data", 0, 1, 0, b"")
        proof.code = handshake._code(servers.token, "client", hello, proof)
        channel.send(proof)
        _, answer = channel.receive(authenticated=False, deadline=time.monotonic() + LIMIT_S)
        assert isinstance(answer, m.Welcome), "with the token it does open"
    with knock(servers) as sock:
        greeted(sock)
        sock.sendall(frame.encode(proof))  # as recorded
        assert sent_away(sock) == "token"
    assert witness.refused() == {"token": 1.0}


def test_a_wrong_token_is_an_error_that_says_so(servers: Servers, witness: Witness) -> None:
    with pytest.raises(
        StoreError, match="the token is not the one of this server; give both the same"
    ):
        ServerStore(servers.coordinator, 1, 2, "guessed", timeout_s=5.0)
    assert witness.refused() == {"token": 1.0}


def test_one_who_connects_and_says_nothing_or_half_a_frame_is_sent_away_in_time(
    servers: Servers, witness: Witness
) -> None:
    with knock(servers) as silent, knock(servers) as half:
        greeted(half)
        half.sendall(frame.encode(PROOF)[:-5])
        assert sent_away(silent) == "slow" and sent_away(half) == "slow"
    witness.some_rounds()
    assert witness.refused() == {"slow": 2.0}


def test_half_a_frame_and_a_broken_line_leave_nothing(servers: Servers, witness: Witness) -> None:
    for cut in range(1, len(frame.encode(PROOF)), 7):
        with knock(servers) as sock:
            greeted(sock)
            sock.sendall(frame.encode(PROOF)[:cut])
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # go without a word: a reset
    witness.some_rounds()


def test_thousands_who_come_and_go_do_not_keep_others_out(
    servers: Servers, witness: Witness
) -> None:
    for _ in range(3000):
        with knock(servers):
            pass
    witness.some_rounds()
    store = ServerStore(servers.coordinator, 1, 2, servers.token, timeout_s=LIMIT_S)
    store.create(SUM)
    assert store.pull({"sum": torch.tensor([-5])})["sum"].tolist() == [[0.0] * 4]
    store.close()


@contextmanager
def crowding(servers: Servers, size: int) -> Iterator[None]:
    """So many connections that say nothing; whoever is sent away comes back at once."""
    enough = threading.Event()

    def crowd() -> None:
        with ExitStack() as stack:
            there: list[socket.socket] = []
            while not enough.is_set():
                there += [stack.enter_context(knock(servers)) for _ in range(size - len(there))]
                full.set()
                quiet = set(there) - set(select.select(there, [], [], 0.01)[0])
                there = [sock for sock in there if sock in quiet or not gone(sock)]

    def gone(sock: socket.socket) -> bool:
        try:
            left = sock.recv(4096) == b""
        except OSError:
            left = True
        if left:
            sock.close()
        return left

    full, thread = threading.Event(), threading.Thread(target=crowd)
    thread.start()
    try:
        assert full.wait(LIMIT_S)
        yield
    finally:
        enough.set()
        thread.join()


def test_a_crowd_that_comes_back_is_bounded_and_workers_still_come_in(
    servers: Servers, witness: Witness
) -> None:
    with crowding(servers, 300):
        held = Footprint.of(servers.children[0].process.pid)
        store = ServerStore(servers.coordinator, 1, 2, servers.token, timeout_s=LIMIT_S)
        store.create(SUM)
        assert store.pull({"sum": torch.tensor([-5])})["sum"].tolist() == [[0.0] * 4]
        store.close()
        witness.some_rounds()
        assert held.threads < 150, "unauthenticated connections must not cost a thread each"
    assert witness.refused().get("crowd", 0) > 100


# -- those who know the token, and do harm --


@contextmanager
def let_in(servers: Servers, role: str = "data", worker: int = 1) -> Iterator[frame.Channel]:
    with knock(servers) as sock:
        channel = frame.Channel(sock)
        handshake.prove(
            channel,
            servers.token,
            m.Proof(b"", role, 0, worker, 0, b""),
            time.monotonic() + LIMIT_S,
        )  # type: ignore[arg-type]
        yield channel


def keyed(
    table: str = "sum", count: int = 1, mode: int = m.IDS_SENT, key: int = 0
) -> m.TableRequest:
    return m.TableRequest(table, count, mode, key)


NOW = m.PushMessage(0)
ID, ROW = memoryview(struct.pack("<q", 900)), memoryview(struct.pack("<4d", 1, 1, 1, 1))
INSANE = [
    ("a table that is not", m.Exchange(1, 0, [keyed("nope")], [], NOW), [ID, ROW], m.Failed),
    ("a pull of one", m.Exchange(1, 0, [], [keyed("nope")]), [ID], m.Failed),
    ("no ids of a sparse table", m.Exchange(1, 0, [keyed(mode=m.DENSE)], [], NOW), [ROW], m.Failed),
    (
        "a gradient of NaN",
        m.Exchange(1, 0, [keyed()], [], NOW),
        [ID, struct.pack("<4d", 1, float("nan"), 1, 1)],
        m.Failed,
    ),
    (
        "a payload that is too short",
        m.Exchange(1, 0, [keyed(count=10**9)], [], NOW),
        [ID, ROW],
        m.Refused,
    ),
    (
        "a count below nothing",
        m.Exchange(1, 0, [keyed(count=-5)], [], NOW),
        [ID, ROW],
        (m.Refused, m.Failed),
    ),
    (
        "a pull of more than there is memory",
        m.Exchange(1, 0, [], [keyed(count=2**50)]),
        [ID],
        (m.Refused, m.Failed),
    ),
    (
        "memory that was never shared",
        m.Exchange(1, 0, [keyed()], [], NOW, arena=m.ArenaRange(7, 0, 64, 64, 64)),
        [],
        m.Refused,
    ),
    ("a dump of what is not", m.DumpTable("nope"), [], m.Failed),
    (
        "an optimizer that is not",
        m.CreateTable(Table("bad", optimizer="nope"), None, []),
        [],
        m.Failed,
    ),
    (
        "an optimizer of a module that was not allowed",
        m.CreateTable(Table("bad", optimizer="os:system"), None, []),
        [],
        m.Failed,
    ),
    (
        "a part of a vector that cannot be",
        m.CreateTable(Table("bad", length=10), (5, 2**40), []),
        [],
        (m.Failed, m.Refused),
    ),
    ("a frame for the coordinator", m.ClaimStep(10, True), [], m.Refused),
]


@pytest.mark.parametrize(
    ("name", "message", "payload", "answer"), INSANE, ids=[case[0] for case in INSANE]
)
def test_a_request_without_sense_is_answered_and_changes_nothing(
    servers: Servers,
    witness: Witness,
    name: str,
    message: m.Message,
    payload: list[bytes],
    answer: type | tuple[type, ...],
) -> None:
    with let_in(servers) as channel:
        channel.send(message, 0, payload)
        _, told = channel.receive(deadline=time.monotonic() + LIMIT_S)
        assert isinstance(told, answer), told
    witness.some_rounds()
    store = ServerStore(servers.coordinator, 1, 2, servers.token, timeout_s=LIMIT_S)
    store.create(SUM)
    assert store.pull({"sum": torch.tensor([900])})["sum"].tolist() == [[0.0] * 4], (
        "not even a part of it was applied"
    )
    store.close()


def test_random_messages_of_one_who_knows_the_token_do_no_harm(
    servers: Servers, witness: Witness
) -> None:
    chance = random.Random(1)
    for kind in [*frame.KINDS, *chance.choices([*frame.KINDS], k=100)]:
        for role in ("data", "control"):
            with let_in(servers, role) as channel:
                values = [
                    chance.choice([0, -1, 2**40, "x", b"\0", [], None, True, 1e300, {}])
                    for _ in range(chance.randrange(12))
                ]
                channel.sock.sendall(raw_frame(kind, msgspec.msgpack.encode(values)))
                channel.sock.settimeout(0.02)
                try:
                    channel.sock.recv(1 << 16)
                except OSError:
                    pass
    witness.some_rounds()


def test_a_frame_larger_than_any_is_refused_before_memory_is_made_for_it(
    servers: Servers, witness: Witness
) -> None:
    before = Footprint.of(servers.children[0].process.pid)
    with let_in(servers) as channel:
        channel.sock.sendall(
            raw_frame(frame.KIND_OF[m.Exchange], sizes=(100, frame.PAYLOAD_BYTES + 1))
        )
        assert sent_away(channel.sock) == "size"
    assert Footprint.of(servers.children[0].process.pid).rss_bytes < before.rss_bytes + (64 << 20)
    assert witness.refused() == {"size": 1.0}


KILLED = """
import sys, time, struct
from manyhands.server.protocol import frame, handshake, messages as m
host, port, token = sys.argv[1:]
channel = handshake.connect(m.ShardAddress(host, int(port)), 60.0, False)
handshake.prove(channel, token, m.Proof(b"", "data", 0, 1, 0, b""), time.monotonic() + 60)
n = 1 << 20
push = m.Exchange(1, 0, [m.TableRequest("sum", n, m.IDS_SENT)], [], m.PushMessage(0))
whole = frame.encode(push, 0, n * 8 + n * 32) + bytes(n * 8) + b"\\1" * (n * 32)
channel.sock.sendall(whole[: len(whole) // 2])
print("half", flush=True)
sys.stdin.read()
"""


def test_a_worker_killed_in_the_middle_of_a_push_has_pushed_nothing(
    servers: Servers, witness: Witness
) -> None:
    host, port = servers.coordinator.rsplit(":", 1)
    words = [sys.executable, "-c", KILLED, host, port, servers.token]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ())
    try:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        witness.some_rounds()  # also while half a push waits
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    witness.some_rounds()  # the witness owns rows 0 to 49, and finds them as it left them


def test_a_server_that_is_not_there_is_named_within_the_timeout() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ServerLost, match=f"server {address}"):
        ServerStore(address, 0, 1, "t", timeout_s=0.5)
