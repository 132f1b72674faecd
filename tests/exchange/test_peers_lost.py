"""Real processes, one of which is killed while the others wait for it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from manyhands.errors import PeerLost
from manyhands.exchange import collective, segments
from support.group_checks import TIMEOUT_S, Case, place
from support.processes import start


def wait_for_a_peer(case: Case, how: str, rank: int, port: int, parent: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = case.connect(rank, store)
    x = place(group, 9001, torch.float32)
    everyone = [r for r in range(group.size) if r != rank]
    group.all_reduce({"x": x}).wait()
    group.swap({"x": x}, everyone)
    group.transfer(dict.fromkeys(everyone, x), {r: torch.empty(9001) for r in everyone}).wait()
    parent.send("ready")
    try:
        if rank == group.size - 1:
            parent.recv()  # never comes: this rank is to be killed
        elif how == "swap":
            group.swap({"x": x}, everyone)
        elif how == "broadcast":
            group.broadcast({"x": x}, source=group.size - 1).wait()
        elif how == "barrier":
            group.barrier()
        elif how == "transfer":
            group.transfer(
                dict.fromkeys(everyone, x), {r: torch.empty(9001) for r in everyone}
            ).wait()
        else:
            group.all_reduce({"x": x}).wait()
    except PeerLost as e:
        parent.send((str(e), e.ranks))
    group.close()
    # stay alive: the others must learn it from the link, not from the end of this process
    parent.recv()


CASES = [Case("shared", "aaa"), Case("gloo", "aaa"), Case("hierarchical", "aab")]
CASES_AND_MORE = [*CASES, pytest.param(Case("hierarchical", "aabb"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("how", ["all_reduce", "broadcast", "barrier", "swap", "transfer"])
@pytest.mark.parametrize("case", CASES_AND_MORE, ids=str)
def test_a_killed_peer_is_lost_to_all_others(case: Case, how: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(wait_for_a_peer, (case, how, rank, store.port)) for rank in range(case.size)]
    for _, pipe in ranks:
        assert pipe.poll(TIMEOUT_S) and pipe.recv() == "ready"
    victim = ranks[-1][0]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    for rank, (_, pipe) in enumerate(ranks[:-1]):
        assert pipe.poll(TIMEOUT_S / 2), f"rank {rank} still waits"
        message, lost = pipe.recv()
        assert f"rank {rank} " in message and how in message
        if case.kind == "shared":
            assert (
                lost == (case.size - 1,)
                and f"rank {case.size - 1} (pid {victim.pid}) died" in message
            )
    if case.kind == "shared":
        assert time.monotonic() - killed_at < 5.0
    pids = [process.pid for process, _ in ranks]
    for _, pipe in ranks[:-1]:
        pipe.send("end")
    for process, _ in ranks:
        process.join()
    assert not [p for pid in pids for p in segments.directory().glob(f"{segments.PREFIX}{pid}-*")]


def test_a_rank_that_never_comes_is_lost_to_the_one_that_connects() -> None:
    with pytest.raises(
        PeerLost, match=r"rank 0: not all of 2 ranks came to connect over gloo in 0\.2 s"
    ):
        collective.connect(0, 2, dist.HashStore(), "gloo", timeout_s=0.2)
