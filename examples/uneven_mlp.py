"""Uneven batches: 461 pictures, so the last batch of an epoch is smaller and uneven over ranks.

    one process         64 samples a step, the last one has 13
    data=2             128 samples a step, the last one has 77: 39 and 38
    data=3             192 samples a step, the last one has 77: 26, 26 and 25
    data=3 batch=153   459 samples a step, the last one has 2: 1, 1 and 0

Averaging what each rank found would weigh these samples wrongly. Here sums and counts are added up
and divided once, so nothing has to be dropped or repeated, and
`manyhands verify examples/uneven_mlp.py data=3` finds no difference.
"""

import torch
from torch import nn

import manyhands as mh
from manyhands import datasets

SAMPLES = 461


def task() -> mh.Task:
    _, (x, y), test = datasets.images()
    return mh.Task(
        model=nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        ),
        loss=nn.functional.cross_entropy,
        train=(x[:SAMPLES], y[:SAMPLES]),
        test=test,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        metrics={"accuracy": mh.accuracy},
        batch=64,
        epochs=20,
    )


if __name__ == "__main__":
    mh.train(task)
