"""The click model by hand on torch.distributed.rpc.

    python click_rpc.py DATA.npz BATCH WARM STEPS PORT

It starts itself: process 0 is the server, 1 and 2 are workers. Rows and their optimizer are on the
server, the network is merged by DistributedDataParallel. Written as well as that library allows:
ids are renumbered beforehand, so that a table is one dense tensor; a request carries both tables;
rows of the next batch are asked for while this one computes; gradients are pushed without waiting;
optimizers are fused, freed memory is kept, DDP's gradients are views of its buckets.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.nn import functional as F
from tuning import TUNED, ddp, settle

WORKERS, DIM = 2, 16
LR, WIDE_LR, L1, BETA = 0.05, 0.05, 0.001, 1.0


class Server:
    """One deep table under Adagrad and one wide table under FTRL."""

    def __init__(self, deep_rows: int, wide_rows: int):
        dice = torch.Generator().manual_seed(0)
        self.deep = torch.empty(deep_rows, DIM).uniform_(-0.05, 0.05, generator=dice)
        self.squares = torch.zeros(deep_rows, DIM)
        self.wide, self.z, self.n = (torch.zeros(wide_rows, 1) for _ in range(3))

    def pull(self, deep: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        return self.deep.index_select(0, deep), self.wide.index_select(0, wide)

    def push(self, deep: Tensor, deep_grad: Tensor, wide: Tensor, wide_grad: Tensor) -> None:
        squares = self.squares.index_select(0, deep).addcmul_(deep_grad, deep_grad, value=1.0)
        self.squares.index_copy_(0, deep, squares)
        self.deep.index_add_(0, deep, deep_grad.div_(squares.sqrt_().add_(1e-10)), alpha=-LR)
        w, z, n = (t.index_select(0, wide) for t in (self.wide, self.z, self.n))
        more = n + wide_grad * wide_grad
        z += wide_grad - (more.sqrt() - n.sqrt()) / WIDE_LR * w
        w = torch.where(z.abs() <= L1, 0.0, -(z - z.sign() * L1) / ((BETA + more.sqrt()) / WIDE_LR))
        for table, rows in ((self.wide, w), (self.z, z), (self.n, more)):
            table.index_copy_(0, wide, rows)


server: Server  # of process 0


def pull(deep: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    return server.pull(deep, wide)


def push(*what: Tensor) -> None:
    server.push(*what)


def forward(network: nn.Module, deep: Tensor, wide: Tensor, numbers: Tensor) -> Tensor:
    return (wide.sum(1) + network(torch.cat([deep.flatten(1), numbers], 1))).squeeze(1)


def work(rank: int, path: str, batch: int, warm: int, steps: int, port: int) -> None:
    global server
    settle(TUNED)
    torch.set_num_threads(1)
    data = {k: torch.from_numpy(v) for k, v in np.load(path).items()}
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, init_method=f"tcp://127.0.0.1:{port}"
    )
    if rank == 0:
        server = Server(int(data["deep_rows"]), int(data["wide_rows"]))
        rpc.init_rpc("server", rank=0, world_size=1 + WORKERS, rpc_backend_options=options)
        rpc.shutdown()
        return
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=1 + WORKERS, rpc_backend_options=options)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port + 1}", rank=rank - 1, world_size=WORKERS
    )
    train(rank - 1, data, batch, warm, steps)
    dist.barrier()
    dist.destroy_process_group()
    rpc.shutdown()


def train(rank: int, data: dict[str, Tensor], batch: int, warm: int, steps: int) -> None:
    torch.manual_seed(0)
    columns, numbers = data["ids"].shape[1], data["numbers"].shape[1]
    plain = nn.Sequential(
        nn.Linear(columns * DIM + numbers, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
    network = ddp(plain, TUNED)
    optimizer = torch.optim.Adagrad(network.parameters(), lr=0.02, fused=True)
    dice = torch.Generator().manual_seed(1)
    order = torch.empty(0, dtype=torch.long)

    def draw() -> tuple:
        nonlocal order
        if len(order) < batch * WORKERS:
            order = torch.randperm(len(data["label"]), generator=dice)
        index, order = order[rank * batch : (rank + 1) * batch], order[batch * WORKERS :]
        ids, crossed = (
            data[k].index_select(0, index).unique(return_inverse=True) for k in ("ids", "crossed")
        )
        reply = rpc.rpc_async("server", pull, (ids[0], crossed[0]))
        return (
            ids,
            crossed,
            data["numbers"].index_select(0, index),
            data["label"].index_select(0, index),
            reply,
        )

    coming, pushed, start = draw(), None, 0.0
    for step in range(warm + steps):
        if step == warm:
            dist.barrier()
            start = time.perf_counter()
        (deep_ids, deep_at), (wide_ids, wide_at), x, y, reply = coming
        deep, wide = (rows.requires_grad_() for rows in reply.wait())
        coming = draw()
        optimizer.zero_grad()
        logits = forward(network, F.embedding(deep_at, deep), F.embedding(wide_at, wide), x)
        F.binary_cross_entropy_with_logits(logits, y).backward()
        optimizer.step()
        if pushed is not None:
            pushed.wait()
        grads = deep.grad / WORKERS, wide.grad / WORKERS
        pushed = rpc.rpc_async("server", push, (deep_ids, grads[0], wide_ids, grads[1]))
    pushed.wait()
    coming[-1].wait()
    dist.barrier()
    seconds = time.perf_counter() - start
    if rank == 0:
        with torch.no_grad():
            ids, crossed = (
                data[f"test_{k}"].unique(return_inverse=True) for k in ("ids", "crossed")
            )
            deep, wide = rpc.rpc_sync("server", pull, (ids[0], crossed[0]))
            logits = forward(
                plain,
                F.embedding(ids[1], deep),
                F.embedding(crossed[1], wide),
                data["test_numbers"],
            )
            loss = F.binary_cross_entropy_with_logits(logits, data["test_label"])
        print(
            json.dumps(
                {"samples_per_s": steps * batch * WORKERS / seconds, "log_loss": float(loss)}
            ),
            flush=True,
        )


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    processes.spawn(work, (path, *map(int, numbers)), nprocs=1 + WORKERS)
