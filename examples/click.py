"""Wide and deep (arXiv:1606.07792): a linear model over crossed columns beside a small network.

The network reads embeddings of the columns. The rows of both are on a parameter server, the
network's weights are merged between workers.

python examples/click.py                           one process
manyhands run examples/click.py data=2 servers=1   two workers and a server that holds the rows
manyhands run examples/click.py data=2 servers=1 lookahead=0 cache=10000
"""

import functools
import itertools

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands import datasets

DATA = "adult"  # or open_bandit: what is shown in a shop, and is it clicked?
DIM = 16


def crossed(ids: Tensor) -> Tensor:
    """An id for every two and every three columns together: a polynomial in 64 bits, where they do
    not meet by chance.
    """
    columns = ids.unbind(1)
    together = [group for size in (2, 3) for group in itertools.combinations(columns, size)]
    return torch.stack(
        [
            functools.reduce(lambda seen, id: (seen ^ id) * 6364136223846793005, group)
            for group in together
        ],
        1,
    )


class WideAndDeep(nn.Module):
    def __init__(self, columns: int, numbers: int):
        super().__init__()
        self.wide = mh.EmbeddingBag(
            "wide", dim=1, optimizer="ftrl", lr=0.05, init="zeros", l1=0.001
        )
        self.deep = mh.Embedding("deep", dim=DIM, optimizer="adagrad", lr=0.05, scale=0.05)
        self.network = nn.Sequential(
            nn.Linear(columns * DIM + numbers, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, ids: Tensor, groups: Tensor, numbers: Tensor) -> Tensor:
        seen = torch.cat([self.deep(ids).flatten(1), numbers], 1)
        return (self.wide(groups) + self.network(seen)).squeeze(1)


def accuracy(logits: Tensor, clicked: Tensor) -> Tensor:
    return ((logits > 0) == (clicked > 0.5)).float().mean()


def task(data: str = DATA) -> mh.Task:
    name, (ids, numbers, clicked), (ids_test, numbers_test, clicked_test) = datasets.clicks(data)
    return mh.Task(
        name=f"wide and deep on {name}",
        model=WideAndDeep(ids.shape[1], numbers.shape[1]),
        loss=nn.functional.binary_cross_entropy_with_logits,
        train=(ids, crossed(ids), numbers, clicked),
        test=(ids_test, crossed(ids_test), numbers_test, clicked_test),
        optimizer=lambda p: torch.optim.Adagrad(p, lr=0.02, fused=True),
        metrics={"accuracy": accuracy},
        batch=256,
        epochs=3,
    )


if __name__ == "__main__":
    mh.train(task)
