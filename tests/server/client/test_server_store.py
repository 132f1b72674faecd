"""Server store over real sockets: the bits of a local store.

Whatever the transport, the number of shards and the filters.
"""

from __future__ import annotations

import math
import platform
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from manyhands.core import Table, TableStore, Tensors
from manyhands.errors import PeerLost, ServerLost, StoreError
from manyhands.server.client.server_store import ServerStore
from manyhands.server.clock import OVER, Clock
from manyhands.server.local_store import LocalStore
from manyhands.server.network.tls import tls_contexts
from manyhands.server.process import Server
from manyhands.server.shard import Shard
from manyhands.server.slots import SLOTS
from support.compare import assert_same_steps
from support.servers import TABLES, TOKEN, USERS, batches, create, joined, play, servers


@pytest.fixture(scope="module")
def alone() -> list[Tensors]:
    return play(LocalStore())


# -- the same bits --


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "unix", "shared"])
def test_servers_give_the_bits_of_a_store_without_them(
    alone: list[Tensors], transport: str, shards: int, count: int
) -> None:
    with servers(count, shards) as started, joined(started[0], transport=transport) as store:
        assert isinstance(store, TableStore)
        assert_same_steps(play(store), alone)
        stats = store.stats()
        assert stats["pushed_rows"] > 0 and stats["client_reconnects"] == 0
        sent, keys = stats["client_sent_bytes"], stats.get("client_key_hits", 0)
        assert (sent < 100_000) if transport == "shared" else (sent > 250_000 and keys > 0)
        store.close()


@pytest.mark.parametrize("transport", ["tcp", "shared"])
@pytest.mark.parametrize("kinds", [60, 10**9])
def test_few_repeats_travel_and_many_are_summed_before_with_the_same_result(
    transport: str, kinds: int
) -> None:
    expected, g = LocalStore(), torch.Generator().manual_seed(2)
    with servers() as (server,), joined(server, transport=transport) as store:
        for each in (expected, store):
            each.create(USERS)
        for _ in range(4):
            ids, updates = (
                torch.randint(0, kinds, (1000,), generator=g),
                torch.randn(1000, 8, generator=g),
            )
            ids[7] = ids[3]
            assert torch.equal(
                store.pull({"users": ids})["users"], expected.pull({"users": ids})["users"]
            )
            for each in (expected, store):
                each.push({"users": ids}, {"users": updates.clone()})
        assert_same_steps([store.dump("users")], [expected.dump("users")])
        store.close()


@pytest.mark.parametrize("transport", ["tcp", "shared"])
def test_updates_that_stand_in_the_stores_own_memory_are_pushed_from_there(transport: str) -> None:
    expected = LocalStore()
    with servers() as (server,), joined(server, transport=transport) as store:
        for each in (expected, store):
            create(each)
        rows, updates = batches()[0]
        room = store.push_buffers(rows)
        for i in range(3):
            for name in room:
                room[name].copy_(updates[name])
            before = sum(
                end - begin for begin, end in store._sender.connections[0].arena.segments[-1].live
            )
            work = store.push(rows, room)
            taken = (
                sum(
                    end - begin
                    for begin, end in store._sender.connections[0].arena.segments[-1].live
                )
                - before
            )
            assert taken < 3000  # ids, and no copy of 26,400 bytes of updates
            if i == 1:
                # it must then be copied
                store._sender.connections[0]._channel.stop()  # type: ignore[union-attr]
            work.wait()
            expected.push(rows, {k: x.clone() for k, x in updates.items()})
            room = store.push_buffers(rows) if i == 1 else room
        assert_same_steps(
            [store.dump(t.name) for t in TABLES], [expected.dump(t.name) for t in TABLES]
        )
        store.close()


def test_shared_memory_is_chosen_by_itself_where_it_can_be() -> None:
    with servers() as (server,), joined(server) as store:
        assert store._sender.connections[0].shared
        store.create(USERS)
        ids = torch.arange(1000)
        rows = store.pull({"users": ids})["users"]
        store.push({"users": ids}, {"users": torch.ones(1000, 8)})
        assert not torch.equal(
            store.pull({"users": ids})["users"], rows
        )  # what was handed out stays as it was
        store.close()


def test_tables_larger_than_the_memory_in_use_make_it_grow() -> None:
    big = Table("big", length=3_000_000, optimizer="sum")
    with servers(shards=2) as (server,), joined(server) as store:
        store.create(big, torch.zeros(3_000_000))
        for _ in range(3):
            store.push({"big": None}, {"big": torch.ones(3_000_000)})
        kept = [store.pull_async({"big": None}) for _ in range(3)]  # several under way at once
        assert all((f.result()["big"] == 3).all() for f in kept)
        assert all(len(connection.arena.segments) <= 2 for connection in store._sender.connections)
        store.close()


def test_a_table_is_restored_over_another_number_of_shards(alone: list[Tensors]) -> None:
    content = dict(zip(("users", "weights"), alone[-2:], strict=True))
    with servers(2, 2) as started, joined(started[0]) as store:
        create(store)
        store.push(
            {"users": torch.arange(1000, 1100)}, {"users": torch.ones(100, 8)}
        )  # which the checkpoint does not have
        for name in content:
            store.restore(name, content[name])
        assert_same_steps([store.dump(name) for name in content], list(content.values()))
        store.close()


# -- several workers --


def together(
    count: int, main: Callable[[TableStore], object], started: list[Server]
) -> list[object]:
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


def test_pending_pushes_of_two_workers_are_committed_together_on_every_shard() -> None:
    def main(store: TableStore) -> Tensors:
        create(store)
        for rows, updates in batches(4):
            store.pull(rows)
            scaled = {k: x * (store.rank + 1) for k, x in updates.items()}
            store.push(rows, scaled, pending=True, weight=1.0 + store.rank)
            store.tick(0)
        return store.pull(batches()[0][0])

    shards, clock = [Shard()], Clock(2)
    expected: dict[int, Tensors] = {}
    threads = [
        threading.Thread(
            target=lambda r=r: expected.update({r: main(LocalStore(r, 2, shards, clock))})
        )
        for r in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with servers(2, 2, workers=2) as started:
        found = together(2, main, started)
    assert_same_steps([expected[0]] * 2, found)  # type: ignore[arg-type]
    assert_same_steps([expected[0]], [expected[1]])


@pytest.mark.parametrize("shards", [1, 3])
def test_after_all_have_flushed_one_that_rested_sees_what_was_committed(shards: int) -> None:
    table, rows = Table("w", length=4000, optimizer="sgd", options={"lr": 1.0}), {"w": None}
    with (
        servers(shards=shards, workers=2) as (server,),
        joined(server, 0, 2) as busy,
        joined(server, 1, 2) as resting,
    ):
        busy.create(table, torch.zeros(4000))
        resting.create(table)
        assert (busy.claim_step(1, True), resting.claim_step(1, True)) == (0, None)
        busy.push(rows, {"w": torch.ones(4000)}, pending=True, weight=4.0)
        assert busy.tick(quorum=2).counted
        assert busy.claim_step(1, True) is None
        busy.flush()
        resting.flush()
        assert resting.pull(rows)["w"].eq(-1).all() and resting.dump("w")["values"].eq(-1).all()


@pytest.mark.parametrize("decay", [None, 0.9])
def test_compensation_works_where_a_server_has_nothing_of_the_table(decay: float | None) -> None:
    def main(store: TableStore) -> Tensors:
        store.create(Table("w", length=6, optimizer="sgd", options={"lr": 0.5}), torch.ones(6))
        store.pull({"w": None}, remember=True)
        for _ in range(3):
            store.push(
                {"w": None}, {"w": torch.full((6,), 0.25)}, compensate=1.0, decay=decay
            ).wait()
        return store.dump("w")

    with servers(3) as started, joined(started[0]) as store:
        found = main(store)
    assert ("state/compensate/mean_square" in found) == (decay is not None)
    assert_same_steps([found], [main(LocalStore())])


def test_a_worker_that_waits_in_vain_is_told_for_whom() -> None:
    with servers(workers=2) as (server,), joined(server, 0, 2, timeout_s=0.3) as store:
        store.create(USERS)
        with pytest.raises(PeerLost, match=r"waited 0\.3 s for workers \[1\]"):
            store.tick(0)


WORKER = """
import sys, torch
from manyhands.core import Table
from manyhands.server.client.server_store import ServerStore
store = ServerStore(sys.argv[1], 1, 2, sys.argv[2])
store.create(Table("users", dim=8, optimizer="adagrad", options={"lr": 0.1}, seed=3))
store.push({"users": torch.arange(5)}, {"users": torch.ones(5, 8)}, pending=True)
print("pushed", flush=True)
sys.stdin.read()
"""


def test_a_dead_worker_is_evicted_and_the_others_go_on() -> None:
    with servers(workers=2) as (server,), joined(server, 0, 2) as store:
        store.create(USERS)
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, server.address, TOKEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == "pushed\n"
            store.push({"users": torch.arange(5)}, {"users": torch.ones(5, 8)}, pending=True)
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
    with (
        servers(workers=2, lease_s=0.3) as (server,),
        joined(server, 0, 2) as store,
        joined(server, 1, 2) as silent,
    ):
        assert silent._heartbeat is not None
        silent._heartbeat._closing.set()  # its connection stays, but nothing is said any more
        assert store.tick(0).clock == 1
        assert server.coordinator is not None and server.coordinator.evicted == [1]
        with pytest.raises(StoreError, match="evicted"):
            silent.tick(0)


def test_a_worker_that_asked_for_a_longer_lease_may_be_silent_for_so_long() -> None:
    with (
        servers(workers=2, lease_s=0.3) as (server,),
        joined(server, 0, 2) as store,
        joined(server, 1, 2, lease_s=30.0) as silent,
    ):
        assert silent._heartbeat is not None
        silent._heartbeat._closing.set()
        ticked = threading.Thread(target=store.tick, args=(0,))
        ticked.start()
        ticked.join(1.0)
        assert ticked.is_alive() and server.coordinator is not None
        assert server.coordinator.evicted == []
        silent.tick(0)
        ticked.join(20)
        assert not ticked.is_alive()


def test_who_waits_when_the_coordinator_ends_is_a_victim() -> None:
    with (
        servers(workers=2) as (server,),
        joined(server, 0, 2) as store,
        joined(server, 1, 2) as other,
    ):
        heard: list[Exception] = []

        def wait(work: Callable[[], object]) -> None:
            try:
                work()
            except Exception as e:
                heard.append(e)

        threads = [
            threading.Thread(target=wait, args=(work,))
            for work in (lambda: store.tick(0), lambda: other.create(USERS))
        ]
        for thread in threads:
            thread.start()
        assert server.coordinator is not None
        server.coordinator.close()
        for thread in threads:
            thread.join(15)
        assert [(type(e), str(e)) for e in heard] == [(PeerLost, OVER)] * 2


def test_the_coordinator_keeps_nothing_of_workers_that_went() -> None:
    with servers(workers=1) as (server,):
        for _ in range(3):
            with joined(server) as store:
                store.close()
        coordinator = server.coordinator
        for thread in list(server._listener.threads):
            if thread.name == "manyhands-connection":
                thread.join(10)
        assert (
            coordinator is not None
            and not coordinator._heartbeats
            and coordinator._left == {(0, 2)}
            and not coordinator.evicted
        )


ARENAS = """
import ctypes, sys, threading
from manyhands.server.malloc_arenas import limit_malloc_arenas
libc = ctypes.CDLL(None)
limit_malloc_arenas()
started = threading.Barrier(12)
def body():
    libc.malloc(5000)
    started.wait()
threads = [threading.Thread(target=body) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_threads_that_come_and_go_leave_no_memory_of_their_own_behind() -> None:
    told = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True
    ).stdout
    assert 1 <= told.count("<heap nr=") <= 2


def test_who_leaves_is_not_waited_for() -> None:
    with (
        servers(workers=2) as (server,),
        joined(server, 0, 2) as store,
        joined(server, 1, 2) as other,
    ):
        other.close()
        assert store.tick(0).clock == 1
        assert server.coordinator is not None and server.coordinator.evicted == []


# -- filters --


@pytest.mark.parametrize(
    ("payload", "bound"), [("bf16", 2**-7), ("fp16", 2**-10), ("int8", 1 / 127)]
)
def test_payloads_of_fewer_bits_stay_within_their_bounds(payload: str, bound: float) -> None:
    sums = Table("sums", dim=16, optimizer="sum", init="zeros")
    dense = Table("dense", length=3000, optimizer="sum", dtype="float64")
    g = torch.Generator().manual_seed(0)
    ids, u, v = (
        torch.arange(500),
        torch.randn(500, 16, generator=g),
        torch.randn(3000, generator=g, dtype=torch.float64),
    )
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
    model = Table("model", dim=4, optimizer="ftrl", options={"l1": 1.0, "lr": 0.1}, init="zeros")
    g = torch.Generator().manual_seed(0)
    ids = torch.arange(200)
    strong = (
        torch.where(torch.arange(200)[:, None] % 4 == 0, 5.0, 0.1)
        * torch.randn(200, 4, generator=g).sign()
    )
    found, sent, withheld = {}, {}, {}
    for delta in (None, math.inf, 0.1):
        with servers() as (server,), joined(server, kkt=delta, transport="tcp") as store:
            store.create(model)
            for _ in range(5):
                store.pull({"model": ids})
                store.push({"model": ids}, {"model": strong})
            stats = store.stats()
            found[delta], sent[delta] = (
                store.pull({"model": ids})["model"],
                stats["client_sent_bytes"],
            )
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
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(cert),
        ],
        check=True,
        capture_output=True,
    )
    ours, theirs = tls_contexts(str(cert), str(key), str(cert))
    with Server(shards=2, token=TOKEN, servers=2, tls=ours) as root:
        with (
            Server(token=TOKEN, coordinator=root.address, tls=ours, client_tls=theirs),
            joined(root, tls=theirs) as store,
        ):
            assert not any(connection.local for connection in store._sender.connections)
            assert_same_steps(play(store), alone)
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
