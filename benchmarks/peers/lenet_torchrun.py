"""LeNet under torchrun: DistributedDataParallel over gloo, as users' scripts are written.

    torchrun ... lenet_torchrun.py [epoch] FOLDER

A rank that dies ends all ranks; torchrun starts them again. Without `epoch` they begin at step 0,
with it at the end of the last epoch, where rank 0 saved model and optimizer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lenet import StepLog, batches, lenet, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path, saves: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    saved = folder / "checkpoint.pt"
    plain, epoch, step = lenet(), 0, 0
    optimizer = sgd(plain)
    if saves and saved.exists():
        found = torch.load(saved)
        plain.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        epoch, step = found["epoch"], found["step"]
    model, log = DistributedDataParallel(plain), StepLog(folder)
    while True:
        for x, y in batches(folder, rank, size, epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            log.write(step, rank)
        epoch += 1
        if saves and rank == 0:
            states = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "epoch": epoch, "step": step}, folder / "new.pt")
            os.replace(folder / "new.pt", saved)


if __name__ == "__main__":
    main(Path(sys.argv[-1]), "epoch" in sys.argv)
