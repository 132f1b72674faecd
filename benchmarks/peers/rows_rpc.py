"""A parameter server as one writes it with torch.distributed.rpc: one tensor of rows, one of squares, Adagrad where they are.

The worker leaves repeated ids out before it asks and sums their gradients before it sends, as ours does, so that the server only
indexes; tensors travel by TensorPipe. A pull follows the answer to the push before it, since calls of RPC have no order.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

LR, EPS = 0.01, 1e-10
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
    _rows.index_copy_(0, ids, _rows.index_select(0, ids).addcdiv_(grads, squares.sqrt_().add_(EPS), value=-LR))


def _join(name: str, rank: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4, rpc_timeout=60)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def _serve(port: int, core: int | None, ends: Connection) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    _join("server", 1, port)
    ends.recv()
    os._exit(0)  # rpc.shutdown would wait for a worker that is measuring something else


class Rows:
    """The worker's side; the server is a process of its own."""

    def __init__(self, rows: int, dim: int, core: int | None):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._ends, theirs = mp.Pipe()
        self._server = mp.get_context("spawn").Process(target=_serve, args=(port, core, theirs), daemon=True)
        self._server.start()
        _join("worker", 0, port)
        rpc.rpc_sync("server", _make, args=(rows, dim))
        self._pushed: Any = None
        self._next: tuple[Tensor, Tensor] | None = None

    def round(self, ids: Tensor, grads: Tensor, following: Tensor) -> Tensor:
        """Pull, push, and while the server is at it prepare the next ids."""
        distinct, where = self._next if self._next is not None else torch.unique(ids, return_inverse=True)
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
        self._pushed = self._next = None

    def close(self) -> None:
        self.finish()
        self._ends.send(None)
        self._server.join(10)
        rpc.shutdown(graceful=False)
