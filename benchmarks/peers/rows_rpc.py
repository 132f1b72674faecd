"""A parameter server on torch.distributed.rpc: rows, their squares, Adagrad on the server.

The worker leaves repeated ids out before it asks and sums their gradients before it sends, as ours
does, so that the server only indexes; tensors travel by TensorPipe. A pull follows the answer to
the push before it, since calls of RPC have no order. Transport (shared memory or TCP) and number of
threads are those that are fastest here, by a trial of each (`fastest`).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed.rpc as rpc
from common import median_round
from peers.tuning import TUNED, settle
from torch import Tensor

LR, EPS = 0.01, 1e-10
TRIAL_ROWS, TRIAL_S = 200_000, 0.5
_rows: Tensor
_squares: Tensor


def _make(rows: int, dim: int) -> None:
    global _rows, _squares
    _rows, _squares = torch.empty(rows, dim).uniform_(-0.01, 0.01), torch.zeros(rows, dim)


def _pull(ids: Tensor) -> Tensor:
    return _rows.index_select(0, ids)


def _push(ids: Tensor, grads: Tensor) -> None:
    squares = _squares.index_select(0, ids).addcmul_(grads, grads)
    _squares.index_copy_(0, ids, squares)
    _rows.index_copy_(
        0, ids, _rows.index_select(0, ids).addcdiv_(grads, squares.sqrt_().add_(EPS), value=-LR)
    )


@dataclass(frozen=True)
class Transport:
    """How the two processes talk; None: what TensorPipe chooses."""

    kind: str | None = None  # shm or uv (TCP)
    threads: int = 4

    def __str__(self) -> str:
        return f"{self.kind or 'its own choice'}, {self.threads} threads"


TRANSPORTS = [Transport(kind, threads) for kind in (None, "shm", "uv") for threads in (1, 4, 16)]


def _join(name: str, rank: int, port: int, by: Transport) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        num_worker_threads=by.threads,
        rpc_timeout=60,
        _transports=None if by.kind is None else [by.kind],
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def _serve(port: int, core: int | None, by: Transport) -> None:
    _settle(core)
    _join("server", 1, port, by)
    signal.pause()


def _work(
    port: int, core: int | None, rows: int, dim: int, asked: Connection, by: Transport
) -> None:
    _settle(core)
    _join("worker", 0, port, by)
    rpc.rpc_sync("server", _make, args=(rows, dim))
    asked.send(None)
    while True:
        ids, grads, seconds = asked.recv()
        asked.send(_median_round(ids, grads, seconds))


def _median_round(ids: list[Tensor], grads: list[Tensor], seconds: float) -> float:
    rounds = Rounds()
    turn = lambda i: rounds.turn(ids[i % len(ids)], grads[i % len(grads)], ids[(i + 1) % len(ids)])
    found = median_round(turn, seconds)
    rounds.finish()
    return found


def _settle(core: int | None) -> None:
    settle(TUNED)
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


class Rounds:
    """Pull, push, and while the server is at it prepare the next ids."""

    def __init__(self) -> None:
        self._pushed: Any = None
        self._next: tuple[Tensor, Tensor] | None = None

    def turn(self, ids: Tensor, grads: Tensor, following: Tensor) -> Tensor:
        distinct, where = (
            self._next if self._next is not None else torch.unique(ids, return_inverse=True)
        )
        if self._pushed is not None:
            self._pushed.wait()
        found = rpc.rpc_sync("server", _pull, args=(distinct,)).index_select(0, where)
        summed = torch.zeros(distinct.numel(), grads.shape[1]).index_add_(0, where, grads)
        self._pushed = rpc.rpc_async("server", _push, args=(distinct, summed))
        self._next = torch.unique(following, return_inverse=True)
        return found

    def finish(self) -> None:
        if self._pushed is not None:
            self._pushed.wait()


class Rows:
    """A worker and a server, processes of their own. TensorPipe polls: idle, each of them takes a
    whole core from whatever else is measured. So they are stopped except in their turns.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        cores: tuple[int | None, int | None],
        by: Transport = Transport(),  # noqa: B008 (it is frozen)
    ):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._asks, asked = mp.Pipe()
        spawn = mp.get_context("spawn")
        self._processes = [
            spawn.Process(target=_work, args=(port, cores[0], rows, dim, asked, by), daemon=True),
            spawn.Process(target=_serve, args=(port, cores[1], by), daemon=True),
        ]
        for process in self._processes:
            process.start()
        asked.close()  # so that the end of a worker ends the wait for it
        try:
            self._asks.recv()
        except EOFError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def median_round(self, ids: list[Tensor], grads: list[Tensor], seconds: float) -> float:
        self._signal(signal.SIGCONT)
        self._asks.send((ids, grads, seconds))
        found = self._asks.recv()
        self._signal(signal.SIGSTOP)
        return float(found)

    def _signal(self, which: int) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, which)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)


def fastest(
    ids: list[Tensor], grads: list[Tensor], dim: int, cores: tuple[int | None, int | None]
) -> tuple[Transport, dict[str, float]]:
    """The transport with the most rounds a second, and what each had; one that this machine does
    not have is left out."""
    few = [i % TRIAL_ROWS for i in ids]
    found: dict[Transport, float] = {}
    for by in TRANSPORTS:
        try:
            rows = Rows(TRIAL_ROWS, dim, cores, by)
        except EOFError:  # its worker could not start
            continue
        found[by] = 1 / rows.median_round(few, grads, TRIAL_S)
        rows.close()
    return max(found, key=found.__getitem__), {str(by): round(r, 1) for by, r in found.items()}
