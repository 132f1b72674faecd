"""Ranks as processes, forked from a server that has torch and the package loaded."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from manyhands.core import Group
from manyhands.exchange import collective
from manyhands.exchange.shared import SharedGroup

# what the server loads once, so that no rank loads it again; the first test that forks starts it
PRELOAD = [
    "torch",
    "torch.distributed",
    "numpy",
    "manyhands.api",
    "manyhands.parallel.trace.trace_model",
    "torch.fx.experimental.validator",
]
TIMEOUT_S = 60.0


def start(target: Callable[..., None], args: tuple[Any, ...]) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def connect(link: str, rank: int, size: int, store: dist.Store) -> Group:
    if link == "shared":
        return SharedGroup(rank, size, store, timeout_s=TIMEOUT_S)
    return collective.connect(rank, size, store, "gloo", TIMEOUT_S)


def be_a_rank(
    link: str, rank: int, size: int, port: int, main: Callable[[Group], Any], parent: Connection
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = connect(link, rank, size, store)
    try:
        parent.send(main(group))
    except Exception:
        parent.send(f"rank {rank}:\n{traceback.format_exc()}")
    group.close()


def on_ranks(link: str, size: int, main: Callable[[Group], Any]) -> list[Any]:
    """What `main` returns on every rank, each a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=be_a_rank, args=(link, rank, size, store.port, main, theirs), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    results = []
    for rank, (process, pipe) in enumerate(ranks):
        if not pipe.poll(2 * TIMEOUT_S):
            process.kill()
        results.append(pipe.recv() if pipe.poll(0) else f"rank {rank} did not report")
    for process, _ in ranks:
        process.join()
    if failed := [r for r in results if isinstance(r, str)]:
        raise AssertionError("\n".join(failed))
    return results
