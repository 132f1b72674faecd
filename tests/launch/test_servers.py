"""Server processes of a run: they start together, report failures, and end with their ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from manyhands.core import ProcessInfo, Table
from manyhands.errors import LaunchError
from manyhands.exchange import segments
from manyhands.launch import server_child, servers
from manyhands.launch.environment import ServedBy
from manyhands.launch.servers import Servers, start
from manyhands.server.client.server_store import ServerStore

LIMIT_S = 60.0
SUM = Table("sum", dim=2, optimizer="sum", init="zeros")


@contextmanager
def started(count: int, ranks: int = 1, **words: object) -> Iterator[list[Servers]]:
    """As on `ranks` ranks, each a thread here with a store in common."""
    store = dist.HashStore()
    places = [ProcessInfo(r, ranks, host="here") for r in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        here = list(
            pool.map(
                lambda p: start(count, p, store, workers=ranks, timeout_s=LIMIT_S, env={}, **words),
                places,
            )
        )  # type: ignore[arg-type]
    try:
        yield here
    finally:
        with ThreadPoolExecutor(ranks) as pool:
            list(pool.map(Servers.close, here))


def until(what: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, f"no {name} within {LIMIT_S:g} s"
        time.sleep(0.01)


def test_a_server_answers_and_ends_when_it_is_told_to() -> None:
    with started(1) as [here]:
        child = here.children[0]
        assert (
            here.coordinator == here.addresses[0]
            and here.coordinator.startswith("127.0.0.1:")
            and here.alive()
        )
        assert os.getsid(child.process.pid) != os.getsid(0), (
            "Ctrl-C of this terminal must not reach it"
        )
        store = ServerStore(here.coordinator, 0, 1, here.token, timeout_s=LIMIT_S)
        store.create(SUM)
        store.push({"sum": torch.tensor([7])}, {"sum": torch.ones(1, 2)}).wait()
        assert store.pull({"sum": torch.tensor([7])})["sum"].tolist() == [[1.0, 1.0]]
        store.close()
        here.close()
        assert child.process.returncode == 0 and here.fate() == "" and here.alive(), (
            "nothing of its own is left to be dead"
        )
        here.close()


def test_three_servers_of_two_ranks_are_found_by_both_with_one_token() -> None:
    with started(3, ranks=2) as ranks:
        assert [len(r.children) for r in ranks] == [2, 1]
        assert (
            len({(r.coordinator, r.token, r.addresses) for r in ranks}) == 1
            and len(set(ranks[0].addresses)) == 3
        )
        stores = [
            ServerStore(r.coordinator, i, 2, r.token, timeout_s=LIMIT_S)
            for i, r in enumerate(ranks)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda s: s.create(SUM), stores))
        ids = torch.arange(100)
        for s in stores:
            s.push({"sum": ids}, {"sum": torch.ones(100, 2)}).wait()
        assert stores[0].pull({"sum": ids})["sum"].sum().item() == 400.0
        for s in stores:
            s.close()


def test_servers_end_only_when_no_rank_needs_them_any_more() -> None:
    with started(1, ranks=2) as [first, second], ThreadPoolExecutor(1) as pool:
        stores = [
            ServerStore(first.coordinator, r, 2, first.token, timeout_s=5.0) for r in range(2)
        ]
        stores[0].create(SUM)
        stores[0].close()
        closing = pool.submit(first.close)
        stores[1].create(SUM)
        for _ in range(200):  # rank 1 is late, and not to be cut off
            stores[1].push({"sum": torch.tensor([7])}, {"sum": torch.ones(1, 2)}).wait()
        stores[1].close()
        assert not closing.done()
        second.close()
        closing.result(LIMIT_S)
        assert first.children == []


# -- what goes wrong --


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (
            "manyhands.no_such_module",
            r"server 0 \(pid \d+\) ended with exit code 1\n.*No module named "
            r"manyhands.no_such_module",
        ),
        ("this", "ended with exit code 0\n.*one honking great idea"),
    ],
)
def test_a_child_that_cannot_serve_is_an_error_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, module: str, says: str
) -> None:
    monkeypatch.setattr(server_child, "MODULE", module)
    with (
        pytest.raises(LaunchError, match=f"(?s)a parameter server could not start: .*{says}"),
        started(1),
    ):
        pass


def test_all_ranks_hear_why_the_server_of_one_could_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_child, "MODULE", "manyhands.no_such_module")
    store = dist.HashStore()
    places = [ProcessInfo(r, 3, host="here") for r in range(3)]

    def attempt(place: ProcessInfo) -> str:
        with pytest.raises(LaunchError) as error:
            start(1, place, store, workers=3, timeout_s=LIMIT_S, env={})
        return str(error.value)

    with ThreadPoolExecutor(3) as pool:
        own, *others = pool.map(attempt, places)
    assert all(words == f"rank 0: {own}" for words in others) and "no_such_module" in own


def test_a_rank_that_never_comes_is_named_within_the_timeout() -> None:
    with pytest.raises(LaunchError, match="waited in vain for rank 1 of 2 to publish its host"):
        start(1, ProcessInfo(0, 2, host="here"), dist.HashStore(), workers=2, timeout_s=0.2, env={})


def test_a_server_that_is_killed_is_told_with_its_fate() -> None:
    with started(1) as [here]:
        os.kill(here.children[0].process.pid, signal.SIGKILL)
        until(lambda: not here.alive(), "end of the server")
        assert (
            f"server 0 (pid {here.children[0].process.pid}) was killed by SIGKILL; the kernel "
            "does so" in here.fate()
        )


PARENT = """
import sys, time
import torch.distributed as dist
from manyhands.core import ProcessInfo
from manyhands.launch.servers import start
here = start(2, ProcessInfo(), dist.HashStore(), workers=1, timeout_s=60, env={})
print(*(c.process.pid for c in here.children), flush=True)
sys.stdin.read()
"""


def test_servers_end_with_their_rank_however_that_ends() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None and parent.stdin is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(segments.alive(p) for p in pids)
        parent.kill()
        until(lambda: not any(segments.alive(p) for p in pids), "end of the servers")
    finally:
        parent.kill()
        parent.communicate()


# -- servers that are there already --

ROOT = ServedBy(uri="10.0.0.1", port=9400, token="secret")


def test_servers_of_the_environment_are_joined_and_none_is_started() -> None:
    env = {
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "9400",
        "DMLC_NUM_SERVER": "3",
        "MANYHANDS_TOKEN": "secret",
    }
    here = start(
        3,
        ProcessInfo(1, 2),
        dist.HashStore(),
        workers=2,
        timeout_s=LIMIT_S,
        env={**env, "DMLC_ROLE": "worker"},
    )
    assert (here.coordinator, here.token, here.children, here.alive(), here.fate()) == (
        "10.0.0.1:9400",
        "secret",
        [],
        True,
        "",
    )
    here.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"num_workers": 4}, "DMLC_NUM_WORKER=4, but the plan says data=2; make them equal"),
        ({"num_servers": 1}, "DMLC_NUM_SERVER=1, but the plan says servers=3; make them equal"),
        ({"tls_ca": "nowhere.pem"}, "MANYHANDS_TLS_CA=nowhere.pem is no certificate"),
        (
            {"role": "server"},
            "DMLC_ROLE=server, but this process trains; start it with DMLC_ROLE=worker",
        ),
    ],
)
def test_what_plan_and_environment_say_must_agree(words: dict[str, object], says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        servers.join(ServedBy(**{**vars(ROOT), **words}), 3, 2)  # type: ignore[arg-type]


# -- where they listen --


def test_ranks_of_several_hosts_listen_where_the_others_reach_them() -> None:
    store = dist.HashStore()
    addresses = {"one": "10.77.0.2", "two": "10.77.0.3"}
    places = [ProcessInfo(0, 2, host="one"), ProcessInfo(1, 2, host="two")]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda p: servers._bind_address(
                p, store, time.monotonic() + 10, {"DMLC_NODE_HOST": addresses[p.host]}
            ),
            places,
        )
    assert list(found) == [("10.77.0.2", False), ("10.77.0.3", False)]


def test_two_machines_of_one_name_are_two_hosts() -> None:
    store = dist.HashStore()
    places = [ProcessInfo(r, 2, host="node", machine=f"boot {r}") for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda p: servers._bind_address(
                p, store, time.monotonic() + 10, {"DMLC_NODE_HOST": f"10.77.0.{p.rank}"}
            ),
            places,
        )
    assert list(found) == [("10.77.0.0", False), ("10.77.0.1", False)]


def test_several_hosts_that_know_only_loopback_are_told_what_to_set() -> None:
    store = dist.HashStore()
    store.set("servers/host/1", '["two", "127.0.0.1"]')
    with pytest.raises(
        LaunchError,
        match=r"rank 0 on one has no address but 127.0.0.1, .*; set MASTER_ADDR to",
    ):
        servers._bind_address(
            ProcessInfo(0, 2, host="one"),
            store,
            time.monotonic() + 10,
            {"MASTER_ADDR": "127.0.0.1"},
        )
