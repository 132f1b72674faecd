"""Broken connections and dying servers: no push is applied twice, none is lost in silence.

Every failure has a name.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import threading
import zlib
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from manyhands.core import Table, Tensors
from manyhands.errors import NotFinite, ServerLost, StoreError
from manyhands.server.client.server_store import ServerStore
from manyhands.server.local_store import LocalStore
from manyhands.server.network import listener, registration
from manyhands.server.process import Server
from manyhands.server.protocol import handshake
from manyhands.server.protocol.frame import VERSION
from manyhands.server.protocol.key_lists import KeyLists
from support.compare import assert_same_steps
from support.servers import TOKEN, USERS, joined, play, process, servers


@pytest.fixture(scope="module")
def alone() -> list[Tensors]:
    return play(LocalStore())


# -- connections that break --


class Proxy:
    """Passes bytes on, and cuts each of the first connections after so many of them."""

    def __init__(self, port: int, cuts: list[int]):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target, self.cuts, self.cut = (
            self.listener.getsockname()[1],
            port,
            list(cuts),
            0,
        )
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            left = [self.cuts.pop(0) if self.cuts else math.inf]
            for a, b in ((near, far), (far, near)):
                self.threads.append(
                    threading.Thread(target=self._pass, args=(a, b, near, far, left), daemon=True)
                )
                self.threads[-1].start()

    def _pass(
        self,
        a: socket.socket,
        b: socket.socket,
        near: socket.socket,
        far: socket.socket,
        left: list[float],
    ) -> None:
        try:
            while data := a.recv(4096):
                if left[0] < len(data):
                    b.sendall(data[: max(0, int(left[0]))])  # in the middle of something
                    self.cut += 1
                    break
                left[0] -= len(data)
                b.sendall(data)
        except OSError:
            pass
        for sock in (near, far):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.mark.parametrize("after", [700, 5_000, 21_000, 26_500, 60_001, 111_111])
def test_requests_whose_connection_broke_are_done_once(alone: list[Tensors], after: int) -> None:
    port = socket.create_server(("127.0.0.1", 0))
    number = port.getsockname()[1]
    port.close()
    proxy = Proxy(number, [after, after // 2, after + 333, 2 * after])
    try:
        with (
            Server(
                f"127.0.0.1:{number}", token=TOKEN, advertise=f"127.0.0.1:{proxy.port}"
            ) as server,
            joined(f"127.0.0.1:{number}", transport="tcp") as store,
        ):
            assert_same_steps(play(store), alone)
            assert store.stats()["client_reconnects"] == proxy.cut == 4
            assert server.refused.total() <= 4
            store.close()
    finally:
        proxy.close()


def test_a_broken_connection_over_shared_memory_loses_nothing(alone: list[Tensors]) -> None:
    with servers(shards=2) as (server,), joined(server, transport="shared") as store:
        post = store._sender.post

        def cutting(*args: object) -> object:
            requests = post(*args)  # type: ignore[arg-type]
            if len(requests) > 1 and requests[1].number % 3 == 0:
                store._sender.connections[1]._channel.stop()  # type: ignore - under way
            return requests

        store._sender.post = cutting  # type: ignore[method-assign]
        assert_same_steps(play(store), alone)
        assert store.stats()["client_reconnects"] > 3
        store.close()


def test_a_key_list_that_the_server_forgot_is_sent_again(
    alone: list[Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:

    know, asked = KeyLists.know, [0]

    def forget(self: KeyLists, *args: object) -> object:
        found = know(self, *args)  # type: ignore[arg-type]
        if found is not None and found[1] is not None:  # only servers keep the ids
            asked[0] += 1
            if asked[0] % 3 == 0:
                return None
        return found

    monkeypatch.setattr(KeyLists, "know", forget)
    with servers(shards=2) as (server,), joined(server, transport="tcp") as store:
        assert_same_steps(play(store), alone)
        assert asked[0] > 6
        store.close()


def test_a_server_that_was_started_anew_is_noticed_and_can_be_filled_again() -> None:
    with Server(shards=0, token=TOKEN) as root:
        first = Server(token=TOKEN, coordinator=root.address).start()
        with joined(root, transport="tcp", timeout_s=10.0) as store:
            store.create(USERS)
            ids, ones = torch.arange(300), torch.ones(300, 8)
            store.push({"users": ids}, {"users": ones})
            store.push({"users": ids}, {"users": ones}).wait()  # the list of ids is known there now
            saved = store.dump("users")
            first.close()
            with Server(
                token=TOKEN, coordinator=root.address
            ) as second:  # another port: the coordinator knows
                assert second.wait_ready(10)
                with pytest.raises(ServerLost, match="was restarted"):
                    store.push({"users": ids}, {"users": ones}).wait()
                store.create(USERS)
                store.restore("users", saved)
                store.push({"users": ids}, {"users": ones}).wait()
                expected = LocalStore()
                expected.create(USERS)
                for _ in range(3):
                    expected.push({"users": ids}, {"users": ones})
                assert torch.equal(store.dump("users")["values"], expected.dump("users")["values"])
                store.close()


def test_another_slot_map_is_fetched_and_refused_requests_go_where_they_belong() -> None:
    sums = Table("sums", dim=2, optimizer="sum", init="zeros")
    with servers(2) as started, joined(started[0]) as store:
        store.create(sums)
        root = started[0].coordinator
        assert root is not None and root.slots is not None
        ids = torch.arange(500)
        store.pull({"sums": ids[:0]})
        turned = replace(
            root.slots,
            epoch=root.slots.epoch + 1,
            owner=(1 - root.slots.owner).astype(np.uint16),
        )
        root.registry.assign(turned)
        root.registry.slot_map()  # all have it
        for _ in range(2):
            store.push({"sums": ids}, {"sums": torch.ones(500, 2)})
        assert (store.pull({"sums": ids})["sums"] == 2).all()
        for s, server in enumerate(started):
            held = np.sort(server.shards[0].dump("sums")["ids"])
            assert np.array_equal(held, ids.numpy()[turned.shard_of("sums", ids.numpy()) == s])
        store.close()


# -- those who must not get in --


def raw_head(version: int = VERSION, size: int = 0, more: int = 0, kind: int = 2) -> bytes:
    raw = struct.pack("<4sHHIQQ", b"mhps", version, kind, size, more, 0)
    return raw + struct.pack("<I", zlib.crc32(raw))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "garbage"),
        (os.urandom(4096), "garbage"),
        (raw_head(version=7), "version"),
        (raw_head(size=1 << 31), "size"),
        (raw_head(more=1 << 62), "size"),
        (raw_head(size=16) + b"\xff" * 16, "garbage"),
    ],
)
def test_an_unauthenticated_peer_is_told_why_and_counted_and_the_server_goes_on(
    said: bytes, reason: str
) -> None:
    with servers() as (server,):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.settimeout(10)
            stranger.sendall(said)
            heard = b""
            while data := stranger.recv(4096):
                heard += data
        assert reason.encode() in heard and server.refused == {reason: 1}
        with joined(server) as store:
            store.create(USERS)
            assert store.stats()[f"refused/{reason}"] == 1
            store.close()


def test_a_wrong_token_is_refused_by_name() -> None:
    with servers() as (server,):
        with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{server.port}: refused \(token\)"):
            ServerStore(server.address, 0, 1, "guess", timeout_s=5)
        assert server.refused == {"token": 1}


def test_silent_connections_are_limited_in_number_and_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(listener, "MAX_UNAUTHENTICATED", 3)
    with servers() as (server,), ExitStack() as stack:
        quiet = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(8)
        ]
        for sock in quiet:
            sock.settimeout(10)
            while sock.recv(4096):  # a hello, then a reason or nothing, then the end
                pass
        assert server.refused["slow"] == 3 and server.refused["crowd"] == 5
        with joined(server) as store:
            store.close()


def test_garbage_from_one_who_proved_himself_ends_only_his_connection() -> None:
    with servers() as (server,), joined(server, transport="tcp") as store:
        store.create(USERS)
        rows = store.pull({"users": torch.arange(10)})["users"]
        store._sender.connections[0]._channel.sock.sendall(os.urandom(500))  # type: ignore
        assert torch.equal(store.pull({"users": torch.arange(10)})["users"], rows)
        assert server.refused == {"garbage": 1} and store.stats()["client_reconnects"] == 1
        store.close()


# -- what is refused and what is lost --


def test_a_push_that_nobody_waited_for_is_not_refused_in_silence() -> None:
    with servers() as (server,), joined(server) as store:
        store.create(USERS)
        store.push({"users": torch.arange(2)}, {"users": torch.full((2, 8), math.inf)})
        with pytest.raises(NotFinite, match="not finite"):
            store.flush()
        store.pull({"users": torch.arange(2)})
        store.push({"users": torch.arange(2)}, {"users": torch.full((2, 8), math.inf)})
        with pytest.raises(NotFinite, match="not finite"):
            store.close()


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    with pytest.raises(ServerLost, match=rf"127\.0\.0\.1:{port} did not answer .* within 0\.3 s"):
        ServerStore(f"127.0.0.1:{port}", 0, 1, TOKEN, timeout_s=0.3)
    monkeypatch.setattr(registration, "REGISTER_S", 0.3)
    with (
        Server(token=TOKEN, coordinator=f"127.0.0.1:{port}") as server,
        pytest.raises(
            ServerLost, match=rf"coordinator at 127\.0\.0\.1:{port} did not answer within 0\.3 s"
        ),
    ):
        server.serve_forever()


def test_a_server_too_many_is_refused_and_says_so() -> None:
    with (
        servers() as (root,),
        Server(token=TOKEN, coordinator=root.address) as another,
        pytest.raises(ServerLost, match="all 1 servers have registered"),
    ):
        another.serve_forever()


def test_a_worker_of_another_size_is_refused() -> None:
    with (
        servers(workers=2) as (server,),
        pytest.raises(StoreError, match="expects 3 workers, but the coordinator was started for 2"),
    ):
        ServerStore(server.address, 0, 3, TOKEN, timeout_s=5)


def test_a_server_that_is_killed_is_named_with_table_and_operation() -> None:
    with (
        process(workers=2) as (server, address),
        joined(address, 0, 2, timeout_s=1.5, transport="tcp") as one,
        joined(address, 1, 2, timeout_s=1.5, transport="shared") as other,
    ):
        ids = torch.arange(20_000)
        for store in (one, other):
            store.create(USERS)
            store.pull({"users": ids})
        server.send_signal(signal.SIGKILL)
        for store in (one, other):
            with pytest.raises(
                ServerLost, match=rf"server {address} (did not answer|is gone .*) a pull of users"
            ):
                while True:  # until it is dead
                    store.pull({"users": ids})
            with pytest.raises(ServerLost, match="push of users"):
                store.push({"users": ids}, {"users": torch.ones(20_000, 8)}).wait()


def _stall(store: ServerStore, stalled: int, pushes: int, wake: threading.Timer) -> None:
    """Push without waiting to servers of which one does not answer for longer than the limit."""
    rows = {"users": torch.arange(64)}
    for _ in range(3):
        store.push(rows, {"users": torch.ones(64, 8)}).wait()
    os.kill(stalled, signal.SIGSTOP)
    wake.start()
    for _ in range(pushes):
        store.push(rows, {"users": torch.ones(64, 8)})


@pytest.mark.parametrize(
    ("how", "transport"),
    [  # each way and each transport once by default
        ("flush", "shared"),
        ("tick", "tcp"),
        ("close", "shared"),
        pytest.param("flush", "tcp", marks=pytest.mark.slow),
        pytest.param("tick", "shared", marks=pytest.mark.slow),
        pytest.param("close", "tcp", marks=pytest.mark.slow),
    ],
)
def test_pushes_that_a_stalled_server_never_acknowledged_are_not_reported_as_done(
    how: str, transport: str
) -> None:
    with (
        process(workers=1, servers=2) as (_, address),
        process(coordinator=address) as (second, _),
        joined(address, timeout_s=1.0, transport=transport) as store,
    ):
        store.create(Table("users", dim=8, optimizer="sgd", options={"lr": 1.0}))
        wake = threading.Timer(3.0, os.kill, (second.pid, signal.SIGCONT))
        try:
            with pytest.raises(ServerLost, match="did not answer a push of users within 1 s"):
                _stall(store, second.pid, 30 if how == "flush" else 5, wake)
                getattr(store, how)()
        finally:
            wake.cancel()
            wake.join()
            os.kill(second.pid, signal.SIGCONT)


def test_a_server_that_dies_before_the_first_request_is_not_waited_for() -> None:
    with servers(2) as (root, other), joined(root) as store:
        assert other.wait_ready(10)
        other.close()
        with pytest.raises(ServerLost, match=r"is gone \(it does not listen any more"):
            store.create(USERS)


def test_a_server_process_says_what_is_wrong_and_ends_with_its_lifeline() -> None:
    with process(workers=1) as (server, address):
        port = address.rpartition(":")[2]
        with pytest.raises(StoreError, match=rf"port {port} on 127\.0\.0\.1 is in use"):
            Server(address, token=TOKEN)
        with process(port=int(port)) as (second, nothing):
            assert nothing == "" and second.wait(30) == 1
            assert second.stderr is not None and f"StoreError: port {port}" in second.stderr.read()
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(30) == 0
