"""LeNet-5 on Fashion-MNIST: the whole of what a user writes.

python examples/lenet.py                        one process
manyhands run examples/lenet.py data=2          two
torchrun --nproc-per-node 2 examples/lenet.py   two, started by torchrun
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
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        metrics={"accuracy": mh.accuracy},
        batch=64,
        epochs=3,
    )


if __name__ == "__main__":
    mh.train(task)
