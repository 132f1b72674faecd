"""Servers and workers over real sockets: the same bits as without them, and no failure that is not named."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from manyhands.core import Store, Table, Tensors
from manyhands.errors import PeerLost, ServerLost, StoreError
from manyhands.exchange.server import handshake, serve
from manyhands.exchange.server.client import ServerStore
from manyhands.exchange.server.clock import Clock
from manyhands.exchange.server.local import LocalStore
from manyhands.exchange.server.serve import Server
from manyhands.exchange.server.shard import Shard
from manyhands.exchange.server.slots import SLOTS, SlotMap

TOKEN = "a secret of this test"
USERS = Table("users", dim=8, rule="adagrad", options={"lr": 0.1}, seed=3)
WEIGHTS = Table("weights", length=5000, rule="momentum", options={"lr": 0.1, "momentum": 0.9})
TABLES = [USERS, WEIGHTS]


@contextmanager
def servers(count: int = 1, shards: int = 1, workers: int = 1, **words: object) -> Iterator[list[Server]]:
    """The first of them coordinates."""
    with ExitStack() as stack:
        first = stack.enter_context(Server(shards=shards, token=TOKEN, servers=count, workers=workers, **words))  # type: ignore[arg-type]
        rest = [stack.enter_context(Server(shards=shards, token=TOKEN, coordinator=first.address)) for _ in range(count - 1)]
        yield [first, *rest]


@contextmanager
def joined(server: Server | str, rank: int = 0, size: int = 1, **words: object) -> Iterator[ServerStore]:
    address = server if isinstance(server, str) else server.address
    store = ServerStore(address, rank, size, TOKEN, **{"timeout_s": 20.0, **words})  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store._end()  # what a test did not close must not wait for a server that is gone


def batches(steps: int = 8, n: int = 200) -> list[tuple[Tensors, Tensors]]:
    g = torch.Generator().manual_seed(1)
    return [
        (
            {"users": torch.randint(-300, 300, (n,), generator=g), "weights": None},
            {"users": torch.randn(n, 8, generator=g), "weights": torch.randn(5000, generator=g)},
        )
        for _ in range(steps)
    ]


def create(store: Store) -> None:
    store.create(USERS)
    store.create(WEIGHTS, torch.arange(5000.0) / 100, {"momentum_buffer": torch.ones(5000)} if store.rank == 0 else None)


def play(store: Store) -> list[Tensors]:
    """All that a worker sees of a short training."""
    create(store)
    seen = []
    for rows, updates in batches():
        seen.append({k: x.clone() for k, x in store.pull(rows).items()})
        store.push(rows, updates, lr=0.05)
    store.tick(0)
    rows, updates = batches()[0]
    store.push(rows, updates, hold=True, weight=2.0)
    store.tick(0)
    seen.append(store.pull(rows))
    return [*seen, *(store.dump(table.name) for table in TABLES)]


def assert_same(one: list[Tensors], other: list[Tensors]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]), key


@pytest.fixture(scope="module")
def alone() -> list[Tensors]:
    return play(LocalStore())


# -- the same bits --


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "unix", "shared"])
def test_servers_give_the_bits_of_a_store_without_them(alone: list[Tensors], transport: str, shards: int, count: int) -> None:
    with servers(count, shards) as started, joined(started[0], transport=transport) as store:
        assert isinstance(store, Store)
        assert_same(play(store), alone)
        stats = store.stats()
        assert stats["pushed_rows"] > 0 and stats["client_reconnects"] == 0
        sent, keys = stats["client_sent_bytes"], stats.get("client_key_hits", 0)
        assert (sent < 100_000) if transport == "shared" else (sent > 250_000 and keys > 0)
        store.close()


def test_shared_memory_is_chosen_by_itself_where_it_can_be() -> None:
    with servers() as (server,), joined(server) as store:
        assert store._links[0].shared
        store.create(USERS)
        ids = torch.arange(1000)
        rows = store.pull({"users": ids})["users"]
        store.push({"users": ids}, {"users": torch.ones(1000, 8)})
        assert not torch.equal(store.pull({"users": ids})["users"], rows)  # what was handed out stays as it was
        store.close()


def test_tables_larger_than_the_memory_in_use_make_it_grow() -> None:
    big = Table("big", length=3_000_000, rule="sum")
    with servers(shards=2) as (server,), joined(server) as store:
        store.create(big, torch.zeros(3_000_000))
        for _ in range(3):
            store.push({"big": None}, {"big": torch.ones(3_000_000)})
        kept = [store.pull_async({"big": None}) for _ in range(3)]  # several under way at once
        assert all((f.result()["big"] == 3).all() for f in kept)
        assert all(len(link.arena.segments) <= 2 for link in store._links)
        store.close()


def test_a_push_and_a_pull_in_one_frame_are_in_this_order() -> None:
    with servers(shards=2) as (server,), joined(server) as store:
        store.create(Table("sums", dim=2, rule="sum", init="zeros"))
        ids, more = torch.tensor([5, 7, 5]), torch.tensor([7, 9])
        found = store.push_pull({"sums": ids}, {"sums": torch.ones(3, 2)}, wants={"sums": more}).result()
        assert found["sums"].tolist() == [[1, 1], [0, 0]]
        assert store.push_pull({"sums": ids}, {"sums": torch.ones(3, 2)}).result()["sums"].tolist() == [[4, 4], [2, 2], [4, 4]]
        store.close()


def test_what_is_pulled_is_written_where_it_is_wanted() -> None:
    with servers(shards=2) as (server,), joined(server) as store:
        create(store)
        out = {"users": torch.empty(5, 8), "weights": torch.empty(5000)}
        found = store.pull({"users": torch.arange(5), "weights": None}, out)
        assert found["users"].data_ptr() == out["users"].data_ptr() and torch.equal(out["weights"], torch.arange(5000.0) / 100)
        assert store.pull({"users": torch.arange(0)})["users"].shape == (0, 8)
        store.close()


def test_a_table_is_restored_over_another_number_of_shards(alone: list[Tensors]) -> None:
    content = dict(zip(("users", "weights"), alone[-2:], strict=True))
    with servers(2, 2) as started, joined(started[0]) as store:
        create(store)
        store.push({"users": torch.arange(1000, 1100)}, {"users": torch.ones(100, 8)})  # which the checkpoint does not have
        for name in content:
            store.restore(name, content[name])
        assert_same([store.dump(name) for name in content], list(content.values()))
        store.close()


# -- several workers --


def together(count: int, main: Callable[[Store], object], started: list[Server]) -> list[object]:
    results: dict[int, object] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        with joined(started[0], rank, count) as store:
            try:
                results[rank] = main(store)
                store.close()
            except BaseException as e:
                errors.append(e)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[r] for r in range(count)]


def test_held_pushes_of_two_workers_are_committed_together_on_every_shard() -> None:
    def main(store: Store) -> Tensors:
        create(store)
        for rows, updates in batches(4):
            store.pull(rows)
            scaled = {k: x * (store.rank + 1) for k, x in updates.items()}
            store.push(rows, scaled, hold=True, weight=1.0 + store.rank)
            store.tick(0)
        return store.pull(batches()[0][0])

    shards, clock = [Shard()], Clock(2)
    expected: dict[int, Tensors] = {}
    threads = [threading.Thread(target=lambda r=r: expected.update({r: main(LocalStore(r, 2, shards, clock))})) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with servers(2, 2, workers=2) as started:
        found = together(2, main, started)
    assert_same([expected[0]] * 2, found)  # type: ignore[arg-type]
    assert_same([expected[0]], [expected[1]])


def test_steps_are_dealt_once_and_everybody_meets() -> None:
    def main(store: ServerStore) -> list[int]:
        mine = []
        while (step := store.deal(20, True)) is not None:
            mine.append(step)
        return mine

    with servers(workers=3) as started:
        dealt = together(3, main, started)  # type: ignore[arg-type]
    assert sorted(step for mine in dealt for step in mine) == list(range(20))  # type: ignore[attr-defined]


def test_a_worker_that_waits_in_vain_is_told_for_whom() -> None:
    with servers(workers=2) as (server,), joined(server, 0, 2, timeout_s=0.3) as store:
        store.create(USERS)
        with pytest.raises(PeerLost, match=r"waited 0\.3 s for workers \[1\]"):
            store.tick(0)


WORKER = """
import sys, torch
from manyhands.core import Table
from manyhands.exchange.server.client import ServerStore
store = ServerStore(sys.argv[1], 1, 2, sys.argv[2])
store.create(Table("users", dim=8, rule="adagrad", options={"lr": 0.1}, seed=3))
store.push({"users": torch.arange(5)}, {"users": torch.ones(5, 8)}, hold=True)
print("pushed", flush=True)
sys.stdin.read()
"""


def test_a_dead_worker_is_evicted_and_the_others_go_on() -> None:
    with servers(workers=2) as (server,), joined(server, 0, 2) as store:
        store.create(USERS)
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, server.address, TOKEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == "pushed\n"
            store.push({"users": torch.arange(5)}, {"users": torch.ones(5, 8)}, hold=True)
            waiting: list[object] = []
            thread = threading.Thread(target=lambda: waiting.append(store.tick(0)))
            thread.start()
            process.send_signal(signal.SIGKILL)
            thread.join(20)
            assert waiting and server.coordinator is not None and server.coordinator.evicted == [1]
            store.close()
        finally:
            process.kill()
            process.communicate()


def test_a_worker_that_falls_silent_is_evicted_too() -> None:
    with servers(workers=2, lease_s=0.3) as (server,), joined(server, 0, 2) as store, joined(server, 1, 2) as silent:
        assert silent._lease is not None
        silent._lease._closing.set()  # its connection stays, but nothing is said any more
        assert store.tick(0).clock == 1
        assert server.coordinator is not None and server.coordinator.evicted == [1]
        with pytest.raises(StoreError, match="evicted"):
            silent.tick(0)


def test_who_leaves_is_not_waited_for() -> None:
    with servers(workers=2) as (server,), joined(server, 0, 2) as store, joined(server, 1, 2) as other:
        other.close()
        assert store.tick(0).clock == 1
        assert server.coordinator is not None and server.coordinator.evicted == []


# -- connections that break --


class Proxy:
    """Passes bytes on, and cuts each of the first connections after so many of them."""

    def __init__(self, port: int, cuts: list[int]):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target, self.cuts, self.cut = self.listener.getsockname()[1], port, list(cuts), 0
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
                self.threads.append(threading.Thread(target=self._pass, args=(a, b, near, far, left), daemon=True))
                self.threads[-1].start()

    def _pass(self, a: socket.socket, b: socket.socket, near: socket.socket, far: socket.socket, left: list[float]) -> None:
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
            Server(f"127.0.0.1:{number}", token=TOKEN, advertise=f"127.0.0.1:{proxy.port}") as server,
            joined(f"127.0.0.1:{number}", transport="tcp") as store,
        ):
            assert_same(play(store), alone)
            assert store.stats()["client_reconnects"] == proxy.cut == 4
            assert server.refused.total() <= 4
            store.close()
    finally:
        proxy.close()


def test_a_broken_connection_over_shared_memory_loses_nothing(alone: list[Tensors]) -> None:
    with servers(shards=2) as (server,), joined(server, transport="shared") as store:
        post = store._post

        def cutting(*args: object) -> object:
            requests = post(*args)  # type: ignore[arg-type]
            if len(requests) > 1 and requests[1].number % 3 == 0:
                store._links[1]._channel.stop()  # type: ignore[union-attr] - while the request is under way
            return requests

        store._post = cutting  # type: ignore[method-assign]
        assert_same(play(store), alone)
        assert store.stats()["client_reconnects"] > 3
        store.close()


def test_a_key_list_that_the_server_forgot_is_sent_again(alone: list[Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.exchange.server import answer

    know, asked = answer.KeyLists.know, [0]

    def forget(self: answer.KeyLists, *args: object) -> object:
        found = know(self, *args)  # type: ignore[arg-type]
        if found is not None and found[1] is not None:  # only servers keep the ids
            asked[0] += 1
            if asked[0] % 3 == 0:
                return None
        return found

    monkeypatch.setattr(answer.KeyLists, "know", forget)
    with servers(shards=2) as (server,), joined(server, transport="tcp") as store:
        assert_same(play(store), alone)
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
            with Server(token=TOKEN, coordinator=root.address) as second:  # another port: the coordinator knows
                assert second.wait_ready(10)
                with pytest.raises(ServerLost, match="started anew"):
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
    sums = Table("sums", dim=2, rule="sum", init="zeros")
    with servers(2) as started, joined(started[0]) as store:
        store.create(sums)
        root = started[0].coordinator
        assert root is not None and root.slots is not None
        ids = torch.arange(500)
        store.pull({"sums": ids[:0]})
        turned = SlotMap(root.slots.epoch + 1, (1 - root.slots.owner).astype(np.uint16), root.slots.shards)
        root.assign(turned)
        root._map()  # all have it
        for _ in range(2):
            store.push({"sums": ids}, {"sums": torch.ones(500, 2)})
        assert (store.pull({"sums": ids})["sums"] == 2).all()
        for s, server in enumerate(started):
            held = np.sort(server.shards[0].dump("sums")["ids"])
            assert np.array_equal(held, ids.numpy()[turned.shard_of("sums", ids.numpy()) == s])
        store.close()


# -- those who must not get in --


def raw_head(version: int = 1, size: int = 0, more: int = 0, kind: int = 2) -> bytes:
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
def test_a_stranger_is_told_why_and_counted_and_the_server_goes_on(said: bytes, reason: str) -> None:
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


def test_strangers_who_say_nothing_are_limited_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(serve, "STRANGERS", 3)
    with servers() as (server,), ExitStack() as stack:
        quiet = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(8)]
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
        store._links[0]._channel.sock.sendall(os.urandom(500))  # type: ignore[union-attr]
        assert torch.equal(store.pull({"users": torch.arange(10)})["users"], rows)
        assert server.refused == {"garbage": 1} and store.stats()["client_reconnects"] == 1
        store.close()


# -- what is refused and what is lost --


def test_what_a_shard_refuses_is_said_and_changes_nothing() -> None:
    with servers(shards=2) as (server,), joined(server) as store:
        create(store)
        ids = torch.arange(10)
        before = store.pull({"users": ids, "weights": None})
        bad = torch.ones(10, 8)
        bad[3, 1] = math.nan
        with pytest.raises(StoreError, match=r"'users'.*not finite.*3"):
            store.push({"users": ids, "weights": None}, {"users": bad, "weights": torch.ones(5000)}).wait()
        after = store.pull({"users": ids, "weights": None})
        assert_same([before], [after])
        for rows, words in (
            ({"users": ids.int()}, "int64"),
            ({"users": ids.view(2, 5)}, "int64 of one axis"),
            ({"users": None}, "ids are"),
            ({"weights": ids}, "is dense"),
            ({"nobody": ids}, "'nobody' is unknown"),
        ):
            with pytest.raises(StoreError, match=words):
                store.pull(rows)
        with pytest.raises(StoreError, match="float32"):
            store.push({"users": ids}, {"users": torch.ones(10, 7)})
        with pytest.raises(StoreError, match=r"differ|given"):
            store.create(Table("users", dim=9))
        store.close()


def test_a_push_that_nobody_waited_for_is_not_refused_in_silence() -> None:
    with servers() as (server,), joined(server) as store:
        store.create(USERS)
        store.push({"users": torch.arange(2)}, {"users": torch.full((2, 8), math.inf)})
        with pytest.raises(StoreError, match="not finite"):
            store.flush()
        store.pull({"users": torch.arange(2)})
        store.push({"users": torch.arange(2)}, {"users": torch.full((2, 8), math.inf)})
        with pytest.raises(StoreError, match="not finite"):
            store.close()


def test_a_server_that_is_not_there_is_named() -> None:
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    with pytest.raises(ServerLost, match=rf"127\.0\.0\.1:{port} did not answer .* within 0\.3 s"):
        ServerStore(f"127.0.0.1:{port}", 0, 1, TOKEN, timeout_s=0.3)
    with pytest.raises(ServerLost, match="coordinator"), Server(token=TOKEN, coordinator=f"127.0.0.1:{port}") as server:
        server._closing.wait(0.1)
        server.close()
        server.lost = server.lost or "the coordinator was not there"
        server.serve_forever()


@contextmanager
def process(**config: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server as the launcher starts it, and its address."""
    started = subprocess.Popen(
        [sys.executable, "-m", "manyhands.exchange.server.serve"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert started.stdin is not None and started.stdout is not None
        started.stdin.write(json.dumps({"token": TOKEN, **config}) + "\n")
        started.stdin.flush()
        line = started.stdout.readline()
        yield started, json.loads(line)["address"] if line else ""
    finally:
        started.kill()
        started.wait()
        for pipe in (started.stdin, started.stdout, started.stderr):
            if pipe is not None:
                pipe.close()


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
            with pytest.raises(ServerLost, match=rf"server {address} (did not answer|is gone .*) a pull of users"):
                while True:  # until it is dead
                    store.pull({"users": ids})
            with pytest.raises(ServerLost, match="push of users"):
                store.push({"users": ids}, {"users": torch.ones(20_000, 8)}).wait()


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


# -- filters --


@pytest.mark.parametrize(("payload", "bound"), [("bf16", 2**-7), ("fp16", 2**-10), ("int8", 1 / 127)])
def test_payloads_of_fewer_bits_stay_within_their_bounds(payload: str, bound: float) -> None:
    sums = Table("sums", dim=16, rule="sum", init="zeros")
    dense = Table("dense", length=3000, rule="sum", dtype="float64")
    g = torch.Generator().manual_seed(0)
    ids, u, v = torch.arange(500), torch.randn(500, 16, generator=g), torch.randn(3000, generator=g, dtype=torch.float64)
    bytes_sent = {}
    for code in (payload, "none"):
        with servers(shards=2) as (server,), joined(server, payload=code, transport="tcp") as store:
            store.create(sums)
            store.create(dense, torch.zeros(3000, dtype=torch.float64))
            store.push({"sums": ids, "dense": None}, {"sums": u, "dense": v})
            found = store.pull({"sums": ids, "dense": None})
            for x, y in ((u, found["sums"]), (v, found["dense"])):
                largest = x.abs().amax(-1, keepdim=True) if payload == "int8" else x.abs()
                assert ((x - y).abs() <= bound * largest).all()
            bytes_sent[code] = store.stats()["client_received_bytes"]
            store.close()
    assert bytes_sent[payload] < 0.6 * bytes_sent["none"]


def test_the_filter_for_l1_models_withholds_only_what_cannot_matter_now() -> None:
    model = Table("model", dim=4, rule="ftrl", options={"l1": 1.0, "lr": 0.1}, init="zeros")
    g = torch.Generator().manual_seed(0)
    ids = torch.arange(200)
    strong = torch.where(torch.arange(200)[:, None] % 4 == 0, 5.0, 0.1) * torch.randn(200, 4, generator=g).sign()
    found, sent, withheld = {}, {}, {}
    for delta in (None, math.inf, 0.1):
        with servers() as (server,), joined(server, kkt=delta, transport="tcp") as store:
            store.create(model)
            for _ in range(5):
                store.pull({"model": ids})
                store.push({"model": ids}, {"model": strong})
            stats = store.stats()
            found[delta], sent[delta] = store.pull({"model": ids})["model"], stats["client_sent_bytes"]
            withheld[delta] = stats.get("client_withheld", 0)
            store.close()
    assert torch.equal(found[None], found[math.inf]) and withheld[None] == withheld[math.inf] == 0
    assert withheld[0.1] > 0 and sent[0.1] < 0.8 * sent[None]
    assert torch.equal(found[0.1], found[None])  # what was withheld would have stayed below l1
    assert (found[None] == 0).any() and (found[None] != 0).any()


# -- TLS --


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_everything_goes_through_tls_too(alone: list[Tensors], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    ours, theirs = serve.contexts(str(cert), str(key), str(cert))
    with Server(shards=2, token=TOKEN, servers=2, tls=ours) as root:
        with Server(token=TOKEN, coordinator=root.address, tls=ours, client_tls=theirs), joined(root, tls=theirs) as store:
            assert not any(link.local for link in store._links)
            assert_same(play(store), alone)
            store.close()
        with pytest.raises((ServerLost, StoreError)):
            ServerStore(root.address, 0, 1, TOKEN, timeout_s=0.5)  # in clear
    assert isinstance(theirs, ssl.SSLContext)


def test_loads_can_be_evened_with_what_the_shards_measured() -> None:
    with servers(shards=2) as (server,), joined(server) as store:
        store.create(USERS)
        for _ in range(64):
            store.pull({"users": torch.arange(2000)})
        loads = sum(shard.slot_loads() for shard in server.shards)
        assert server.coordinator is not None and server.coordinator.slots is not None
        assert loads.sum() > 0 and server.coordinator.slots.by_load(loads).balance(loads) <= 1.05
        assert loads.size == SLOTS
        store.close()
