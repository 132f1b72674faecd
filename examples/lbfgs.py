"""L-BFGS: softmax regression on handwritten digits, to the one minimum of a convex loss.

    manyhands run examples/lbfgs.py data=2                  the full gradient, over two ranks
    manyhands run examples/lbfgs.py data=2 micro=8          ... each rank's part in eight pieces
    manyhands verify examples/lbfgs.py data=2               two ranks take the steps of one

A batch of all samples makes a step one iteration over the full gradient. All ranks search along
one direction: each step of the line search sums loss and gradient over them.
"""

from typing import Any

from torch import Tensor, nn

import manyhands as mh
from manyhands import datasets

PENALTY = 1e-4


def penalised(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    weights = sum(p.square().sum() for p in model.parameters())
    return nn.functional.cross_entropy(model(x), y) + PENALTY / 2 * weights


def task() -> mh.Task:
    (x, y), test = datasets.digits()
    return mh.Task(
        model=nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 10)),
        step=penalised,
        train=(x, y),
        test=test,
        optimizer=mh.LBFGS,
        batch=len(x),
        epochs=60,  # one step each
    )


if __name__ == "__main__":
    mh.train(task)
