"""The same tiny model in torch's DistributedDataParallel, started by torchrun, tuned."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(65536, 16)
    y = (x.sum(1) > 0).long()
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    for step in range(steps):
        at = (step * size + rank) * 64 % len(x)
        loss = nn.functional.cross_entropy(model(x[at : at + 64]), y[at : at + 64])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            Path(f"first-{rank}").write_text(repr(time.time()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
