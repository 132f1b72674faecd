"""A schedule over all steps, an average of the weights, and an early end."""

import torch
from torch import nn
from torch.optim import lr_scheduler as lr

import manyhands as mh
from manyhands import datasets


def task():
    _, train, test = datasets.images()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(train[0][0].numel(), 64), nn.ReLU(), nn.Linear(64, 10)
    )
    return mh.Task(
        model=model,
        loss=nn.functional.cross_entropy,
        train=train,
        test=test,
        epochs=20,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        schedule=lambda o, total_steps: lr.OneCycleLR(o, 0.2, total_steps=total_steps),
        metrics={"accuracy": mh.accuracy},
        callbacks=[mh.EMA(0.99), mh.EarlyStopping("accuracy", patience=3)],
    )


if __name__ == "__main__":
    mh.train(task)
