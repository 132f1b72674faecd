"""LeNet-5 on Fashion-MNIST over parameter servers: no worker is more than four steps ahead.

python examples/lenet_server.py                  two workers, two servers, at most 4 steps apart
manyhands run examples/lenet_server.py data=4 servers=1 staleness=inf   nobody waits for others
manyhands run examples/lenet_server.py data=4 servers=1 quorum=3        first three gradients a step
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
        name=f"LeNet on {name}",
        model=LeNet(),
        loss=nn.functional.cross_entropy,
        train=train,
        test=test,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),  # runs on the servers
        metrics={"accuracy": mh.accuracy},
        batch=64,
        epochs=3,
    )


if __name__ == "__main__":
    mh.train(task, "data=2 servers=2 staleness=4")
