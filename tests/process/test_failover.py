"""Servers that die, move and come back under load: every acknowledged push counts once."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from manyhands.core import ProcessInfo, Table
from manyhands.errors import PlanError, ServerLost, StoreError
from manyhands.launch.server_child import COORDINATOR
from manyhands.launch.servers import ServerOptions, Servers, start
from manyhands.plan import words
from manyhands.server import server_registry
from manyhands.server.client.operator import Operator
from manyhands.server.client.server_store import ServerStore
from manyhands.server.process import Server
from support import failover
from support.servers import TOKEN, joined

SUMS = Table("sums", dim=4, optimizer="sum", init="zeros")
IDS = torch.arange(300)


# -- kills --


@pytest.mark.parametrize(
    "kills", [20, pytest.param(200, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_any_server_may_die_at_any_moment_in_process(
    kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_registry, "GRACE_S", 0.02)
    for seed, replicas in ((0, 2), (1, 3)):
        with failover.threads(4, replicas, 2) as started:
            found = failover.run(started, kills // 2, seed, pause_s=0.02)
        assert len(found.kills) == kills // 2


@pytest.mark.slow  # by default: a thread that dies, above, and one kill -9 in test_chaos_process.py
@pytest.mark.parametrize("kills", [3, 20], ids=["few", "many"])
def test_any_server_may_die_by_kill_9(kills: int) -> None:
    with failover.processes(3, 2, 2) as started:
        found = failover.run(started, kills)
    assert len(found.recoveries()) == kills
    print(f"median recovery {statistics.median(found.recoveries()):.3f} s")


def launched(tmp_path: Path, **options: object) -> Servers:
    return start(
        3,
        ProcessInfo(),
        dist.HashStore(),
        workers=1,
        timeout_s=60.0,
        options=ServerOptions(
            replicas=2,
            membership=str(tmp_path / "membership"),
            **options,  # type: ignore[arg-type]
        ),
        env={},
    )


def test_a_coordinator_that_is_killed_is_started_again_and_goes_on(tmp_path: Path) -> None:
    """Pushes do not need it; ticks wait for it; servers and supervisor outlive it."""
    servers = launched(tmp_path)
    try:
        store = ServerStore(servers.coordinator, 0, 1, servers.token, timeout_s=60.0)
        store.create(SUMS)
        for turn in range(2):
            coordinator = next(c for c in servers.children if c.index == COORDINATOR)
            coordinator.process.kill()
            store.push({"sums": IDS}, {"sums": torch.ones(300, 4)}).wait()
            store.push({"sums": IDS}, {"sums": torch.ones(300, 4)}, pending=True, weight=1.0)
            assert store.tick(0).clock == turn + 1
        assert (store.pull({"sums": IDS})["sums"] == 4).all()
        server = next(c for c in servers.children if c.index == 1)
        server.process.kill()  # the new coordinator notices
        store.push({"sums": IDS}, {"sums": torch.ones(300, 4)}).wait()
        assert (store.pull({"sums": IDS})["sums"] == 5).all()
        store.close()
        assert "was killed by SIGKILL" in servers.fate()
    finally:
        servers.close()
    assert not (tmp_path / "membership").exists()


@pytest.mark.slow  # tests/membership/test_file_keeper.py has it without servers
def test_two_coordinators_for_one_run_the_second_is_refused(tmp_path: Path) -> None:
    config = {"token": TOKEN, "shards": 0, "servers": 2, "membership": str(tmp_path), "run": "r"}
    with ExitStack() as stack:
        procs = []
        for _ in range(2):
            each = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "manyhands.server.process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(each.kill)
            assert each.stdin is not None and each.stdout is not None
            each.stdin.write(json.dumps(config) + "\n")
            each.stdin.flush()
            procs.append(each)
            if len(procs) == 1:
                assert "address" in json.loads(each.stdout.readline())
        assert procs[1].wait(60) == 1
        assert procs[1].stderr is not None
        said = procs[1].stderr.read()
        assert f"pid {procs[0].pid}" in said, said


# -- pauses --


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up_after_its_lease_and_ends() -> None:
    with failover.processes(3, 2, 1) as (root, _):
        assert root.coordinator is not None
        registry = root.coordinator.registry
        registry.lease_s = 1.5
        with joined(root, timeout_s=60.0) as store:
            store.create(SUMS)
            store.push({"sums": IDS}, {"sums": torch.ones(300, 4)}).wait()
            hung = registry.status()["servers"][0]
            os.kill(hung["pid"], signal.SIGSTOP)
            try:
                store.push({"sums": IDS}, {"sums": torch.ones(300, 4)}).wait()
            finally:
                os.kill(hung["pid"], signal.SIGCONT)
            assert (store.pull({"sums": IDS})["sums"] == 2).all()
            # what it has is worth nothing any more: it ends
            assert hung["server"] not in [s["server"] for s in registry.status()["servers"]]
            until(lambda: "Z" in Path(f"/proc/{hung['pid']}/stat").read_text().split()[2])
            store.push({"sums": IDS}, {"sums": torch.ones(300, 4)}).wait()
            assert (store.pull({"sums": IDS})["sums"] == 3).all()
            store.close()


# -- moves --


@pytest.mark.parametrize("replicas", [1, 2])
def test_shards_move_while_workers_push(replicas: int) -> None:
    with ExitStack() as stack:
        root = stack.enter_context(
            Server(shards=0, token=TOKEN, servers=2, workers=2, replicas=replicas)
        )
        for _ in range(2):
            stack.enter_context(Server(shards=2, token=TOKEN, coordinator=root.address))
        operator = stack.enter_context(Operator(root.address, TOKEN))
        ledger, stop = failover.Ledger(), threading.Event()
        stores = failover.join(root, 2, stack)
        at_work = [
            threading.Thread(target=failover.work, args=(store, ledger, stop)) for store in stores
        ]
        for thread in at_work:
            thread.start()
        stack.enter_context(Server(shards=2, token=TOKEN, coordinator=root.address, extra=True))
        until(lambda: len(operator.status()["servers"]) == 3)
        assert operator.rebalance()
        quiet(operator)
        held = [s["holds"] for s in operator.status()["servers"]]
        assert all(held), "the new server holds some"
        first = operator.status()["servers"][0]["server"]
        operator.drain(first)
        until(lambda: first not in [s["server"] for s in operator.status()["servers"]])
        quiet(operator)
        stop.set()
        for thread in at_work:
            thread.join()
        assert not ledger.errors, ledger.errors
        failover.check(stores, ledger)
        status = operator.status()
        assert all(len(chain) == replicas for chain in status["chains"]) and not status["losses"]
        if replicas == 2:
            with pytest.raises(StoreError, match="server 99 is not there; servers are"):
                operator.drain(99)


def test_the_last_server_cannot_be_drained() -> None:
    with Server(token=TOKEN, workers=1) as root, Operator(root.address, TOKEN) as operator:
        assert root.wait_ready(10)
        with pytest.raises(StoreError, match=r"server 0 is the last one: .* add another server"):
            operator.drain(0)
        assert not operator.rebalance()
        with joined(root) as store:
            store.create(SUMS)
            store.close()


def until(done: object, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def quiet(operator: Operator) -> None:
    until(lambda: not any(s["learns"] or s["gives"] for s in operator.status()["servers"]))


# -- losses and words --


def test_a_loss_of_all_copies_names_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_registry, "GRACE_S", 0.02)
    with failover.threads(3, 2, 1) as (root, servers), joined(root, timeout_s=20.0) as store:
        store.create(SUMS)
        store.push({"sums": IDS}, {"sums": torch.ones(300, 4)}).wait()
        for kill in servers.kill[:2]:
            kill()
        with pytest.raises(ServerLost, match=r"with shard \d, 34\d of 1024 slots are lost"):
            for _ in range(100):
                store.push({"sums": IDS}, {"sums": torch.ones(300, 4)}).wait()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("servers=2 replicas=3", "replicas=3 with servers=2: each copy needs a server of its own"),
        ("servers=2 replicas=0", "replicas=0, but at least 1 is needed"),
        ("servers=1 ack=primary", "ack=primary has no effect without copies"),
        ("servers=1 membership=etcd://h:1", "has no effect without copies"),
        ("replicas=2", "replicas=2 is about tables on servers, but the plan has none"),
        ("servers=1 server_memory=much", "a number of bytes with a unit is needed"),
        ("servers=1 shards=0", "shards=0, but at least 1 is needed"),
    ],
)
def test_words_that_cannot_be_are_refused(given: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        words.parse(f"merge=downpour {given}" if "servers" in given else given)
