"""The model of `bench model-parallel`, and the same by hand on torch's own parts.

    python gpt.py cpu|cuda tensor|pipe|shard LAYERS DIM BLOCK BATCH MICRO WARM STEPS PORT

Two processes over gloo, with cuda both on the first card; prints seconds a step. A GPT whose heads
are counted by `-1`, as torch's tensor parallelism needs it. By hand the optimizer is fused and
freed memory is kept, as ours does.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD, CHARACTERS = 32, 96


class Attention(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            part(x).view(batch, time, -1, HEAD).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm1, self.attention, self.norm2 = (
            nn.LayerNorm(dim),
            Attention(dim),
            nn.LayerNorm(dim),
        )
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Front(nn.Module):
    def __init__(self, dim: int, block: int):
        super().__init__()
        self.characters, self.places = (
            nn.Embedding(CHARACTERS, dim),
            nn.Parameter(0.02 * torch.randn(block, dim)),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.characters(ids) + self.places


class GPT(nn.Sequential):
    def __init__(self, layers: int, dim: int, block: int):
        super().__init__(
            Front(dim, block),
            *(Block(dim) for _ in range(layers)),
            nn.LayerNorm(dim),
            nn.Linear(dim, CHARACTERS),
        )


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rows(samples: int, block: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(
        CHARACTERS, (samples, block + 1), generator=torch.Generator().manual_seed(1)
    )
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def optimizer(parameters, fused=None):  # type: ignore[no-untyped-def]
    return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)


# -- by hand --


def by_hand(
    rank: int,
    device: str,
    kind: str,
    layers: int,
    dim: int,
    block: int,
    batch: int,
    micro: int,
    warm: int,
    steps: int,
    port: int,
) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from tuning import TUNED, settle

    settle(TUNED)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT(layers, dim, block).to(device)
    mesh = init_device_mesh("cpu", (2,))
    if device == "cuda":  # init_device_mesh would give each rank a card of its own
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    found = rows((warm + steps) * batch * (2 if kind == "shard" else 1), block)
    x, y = (part.to(device) for part in found)
    make = {"tensor": _tensor, "pipe": _pipe, "shard": _shard}[kind]
    step = make(model, mesh, rank, batch, micro)

    def settled() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    start = 0.0
    for i in range(warm + steps):
        if i == warm:
            settled()
            start = time.perf_counter()
        at = (2 * i + rank) * batch if kind == "shard" else i * batch
        step(x[at : at + batch], y[at : at + batch])
    settled()
    seconds = time.perf_counter() - start
    if rank == 0:
        print(json.dumps({"seconds": seconds / steps}), flush=True)
    dist.destroy_process_group()


def _tensor(model, mesh, rank, batch, micro):  # type: ignore[no-untyped-def]
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for part in model:
        if isinstance(part, Block):
            plan = {f"attention.{n}": ColwiseParallel() for n in "qkv"}
            plan |= {
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            }
            parallelize_module(part, mesh, plan)
    update = optimizer(model.parameters(), fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        loss(model(x), y).backward()
        update.step()
        update.zero_grad()

    return step


def _pipe(model, mesh, rank, batch, micro):  # type: ignore[no-untyped-def]
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    layers = list(model)
    half = 1 + (len(layers) - 3) // 2
    part = nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), micro, loss_fn=loss)
    update = optimizer(part.parameters(), fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        update.step()
        update.zero_grad()

    return step


def _shard(model, mesh, rank, batch, micro):  # type: ignore[no-untyped-def]
    from torch.distributed.fsdp import fully_shard

    for part in model:
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    update = optimizer(model.parameters(), fused=True)

    def step(x: Tensor, y: Tensor) -> None:
        loss(model(x), y).backward()
        update.step()
        update.zero_grad()

    return step


if __name__ == "__main__":
    device, kind, *numbers = sys.argv[1:]
    torch.multiprocessing.spawn(by_hand, (device, kind, *map(int, numbers)), nprocs=2)
