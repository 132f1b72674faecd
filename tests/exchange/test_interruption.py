"""Interruption: a rank that waits for another one is ended at once, from another thread."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from manyhands.core import Group
from manyhands.errors import PeerLost
from manyhands.exchange import collective
from manyhands.exchange.interruption import Interruption, open_sockets, shut_down, wait_for_keys
from manyhands.exchange.shared import SharedGroup
from support.processes import TIMEOUT_S, start

AT_ONCE_S = 5.0  # far less than the time limit of the groups, on a busy machine too
WHY = "rank 1 is lost (epoch 7)"


# -- the object --


def test_what_is_set_first_is_what_the_rank_raises() -> None:
    interruption = Interruption()
    interruption.check()
    interruption.set(WHY)
    interruption.set("something else")
    with pytest.raises(PeerLost, match=r"^rank 1 is lost \(epoch 7\)$"):
        interruption.check()


def test_actions_are_called_once_also_when_they_come_late_and_not_after_they_were_cleared() -> None:
    called: list[str] = []
    interruption = Interruption()
    interruption.add(lambda: called.append("early"))
    interruption.set(WHY)
    interruption.set(WHY)
    interruption.add(lambda: called.append("late"))
    assert called == ["early", "late"]

    cleared = Interruption()
    cleared.add(lambda: called.append("never"))
    cleared.clear()
    cleared.set(WHY)
    assert called == ["early", "late"]


def test_a_wait_for_keys_ends_with_them_with_the_interruption_or_with_the_time() -> None:
    store, interruption = dist.HashStore(), Interruption()
    store.set("a", "")
    wait_for_keys(store, ["a"], 1.0, interruption)
    with pytest.raises(RuntimeError, match=r"within 0\.01 s"):
        wait_for_keys(store, ["a", "b"], 0.01, interruption)
    interruption.set(WHY)
    wait_for_keys(store, ["a"], 1.0, interruption)
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        wait_for_keys(store, ["a", "b"], 60.0, interruption)


def test_connections_are_shut_down_and_listening_sockets_and_files_are_not() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        before = open_sockets()
        with socket.create_connection(listening.getsockname()) as near:
            far = listening.accept()[0]
            found = open_sockets() - before
            assert found == {near.fileno(), far.fileno()}
            shut_down([near.fileno(), listening.fileno(), 10**6])
            far.settimeout(AT_ONCE_S)
            assert far.recv(1) == b"", "the other end is told"
            far.close()
            with socket.create_connection(listening.getsockname()):
                listening.accept()[0].close()
        file = os.open("/dev/null", os.O_RDONLY)
        shut_down([file])
        assert os.read(file, 1) == b""
        os.close(file)


# -- ranks that wait for one that does not come --


def join(link: str, rank: int, store: dist.Store, interruption: Interruption) -> Group:
    if link == "shared":
        return SharedGroup(rank, 2, store, timeout_s=TIMEOUT_S, interruption=interruption)
    return collective.connect(rank, 2, store, "gloo", TIMEOUT_S, interruption=interruption)


def exchanges(group: Group) -> dict[str, Callable[[], object]]:
    other, x = 1 - group.rank, torch.ones(5000)
    return {
        "all_reduce": lambda: group.all_reduce({"x": x}).wait(),
        "swap": lambda: group.swap({"x": x}, [other]),
        "transfer": lambda: group.transfer({other: x}, {other: torch.empty(5000)}).wait(),
        "barrier": group.barrier,
        "broadcast": lambda: group.broadcast({"x": x}, source=1).wait(),
    }


def client(port: int) -> dist.Store:
    limit = timedelta(seconds=TIMEOUT_S)
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)


def wait_in(link: str, hows: list[str], rank: int, port: int, parent: Connection) -> None:
    """Rank 1 stays away from each exchange; rank 0 waits in it, and is interrupted."""
    torch.set_num_threads(1)
    store = client(port)
    for how in hows:
        interruption = Interruption()
        group = join(link, rank, dist.PrefixStore(how, store), interruption)
        exchanges(group)[how]()  # both are there
        if rank == 1:
            parent.recv()
            group.close()
            continue
        timer = threading.Timer(0.05, interruption.set, [WHY])
        timer.start()
        started = time.monotonic()
        try:
            exchanges(group)[how]()
            parent.send((how, "was not ended", 0.0))
        except PeerLost as e:
            parent.send((how, str(e), time.monotonic() - started))
        timer.join()
        interruption.clear()
        group.close()
        parent.recv()


@pytest.mark.parametrize(
    ("link", "hows"),
    [
        ("shared", ["all_reduce", "swap", "transfer", "barrier", "broadcast"]),
        ("gloo", ["all_reduce", "transfer", "swap", "barrier"]),
    ],
    ids=["shared", "gloo"],
)
def test_a_rank_that_waits_in_an_exchange_is_ended_at_once(link: str, hows: list[str]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(wait_in, (link, hows, rank, store.port)) for rank in range(2)]
    try:
        for expected in hows:
            assert ranks[0][1].poll(TIMEOUT_S), f"{expected}: still waits"
            how, said, seconds = ranks[0][1].recv()
            assert how == expected and seconds < AT_ONCE_S
            assert link == "gloo" or WHY in said, said
            for _, pipe in ranks:
                pipe.send("next")
    finally:
        for process, _ in ranks:
            process.join(AT_ONCE_S)
            process.kill()
            process.join()


@pytest.mark.parametrize("link", ["shared", "gloo"])
@pytest.mark.parametrize("early", [True, False], ids=["before", "meanwhile"])
def test_a_rank_that_connects_to_one_that_never_comes_is_ended_at_once(
    link: str, early: bool
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    interruption = Interruption()
    if early:
        interruption.set(WHY)
    timer = threading.Timer(0.05, interruption.set, [WHY])
    timer.start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 1 is lost \(epoch 7\)"):
        join(link, 0, client(store.port), interruption)
    assert time.monotonic() - started < AT_ONCE_S
    timer.join()
