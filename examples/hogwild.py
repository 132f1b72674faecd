"""Hogwild! on Fashion-MNIST: processes train one LeNet in shared memory, without any lock.

manyhands run examples/hogwild.py data=2 merge=hogwild                            two ranks
manyhands run examples/hogwild.py data=2 merge=hogwild then=all_reduce at=epoch:2   then in step
manyhands race examples/hogwild.py data=1 "data=2 merge=hogwild" --target accuracy=0.8

Each rank makes a step by every batch of its own, so the learning rate is that of one rank's batch.
There is no momentum: SGD without it writes only what its gradient touches, and momentum adds to
what the staleness of gradients does already.
"""

import torch
from torch import nn

import manyhands as mh
from manyhands import datasets


class LeNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip


def task() -> mh.Task:
    name, train, test = datasets.images()
    return mh.Task(
        name=f"LeNet on {name}, to be trained without locks",
        model=LeNet(),
        loss=nn.functional.cross_entropy,
        train=train,
        test=test,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 500, gamma=0.9),
        metrics={"accuracy": mh.accuracy},
        batch=64,
        epochs=3,
    )


if __name__ == "__main__":
    mh.train(task)
