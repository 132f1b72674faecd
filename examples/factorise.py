"""Matrix factorisation: who likes what, from a million users and items as raw 64-bit ids.

A few of the users and items are everywhere (Zipf).

python examples/factorise.py                            one process
manyhands run examples/factorise.py data=2 servers=2    two workers, two servers that share the rows
manyhands run examples/factorise.py data=2 servers=1 cache=20000 cache_age=4    hot rows cached
"""

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh

USERS, ITEMS, RATINGS, DIM, ZIPF = 1_000_000, 100_000, 200_000, 16, 1.05


class Factorise(nn.Module):
    """like(u, i) = <p_u, q_i> + b"""

    def __init__(self) -> None:
        super().__init__()
        self.users = mh.Embedding("users", DIM, optimizer="adagrad", lr=0.3, scale=0.3)
        self.items = mh.Embedding("items", DIM, optimizer="adagrad", lr=0.3, scale=0.3)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, who: Tensor, what: Tensor) -> Tensor:
        return (self.users(who) * self.items(what)).sum(-1) + self.bias


def zipf(dice: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Ranks below n of which the k-th comes with probability ~ k^-ZIPF, by inverting the
    distribution of the continuous law.
    """
    bound = n ** (1 - ZIPF)
    return (1 - dice.random(size) * (1 - bound)) ** (1 / (1 - ZIPF)) // 1


def ratings(size: int = RATINGS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Who, what, and by how much: a rank-4 truth of 64-bit ids plus noise."""
    dice = np.random.default_rng(seed)
    users, items = (
        zipf(dice, USERS, size).astype(np.int64),
        zipf(dice, ITEMS, size).astype(np.int64),
    )
    truth = np.stack(
        [np.sin(users * f + 1.3) * np.cos(items * f * 1.7) for f in (0.7, 1.1, 1.9, 2.3)]
    ).sum(0)
    liked = truth + 3 + 0.1 * dice.normal(size=size)
    spread = np.int64(0x2545F4914F6CDD1D)  # ids as they come: no range, no order
    return (
        torch.from_numpy(users * spread),
        torch.from_numpy(items * spread),
        torch.from_numpy(liked.astype(np.float32)),
    )


def task() -> mh.Task:
    who, what, liked = ratings()
    cut = len(who) * 9 // 10
    return mh.Task(
        name=f"matrix factorisation, {len(who):,} ratings with Zipf({ZIPF}) ids",
        model=Factorise(),
        loss=nn.functional.mse_loss,
        train=(who[:cut], what[:cut], liked[:cut]),
        test=(who[cut:], what[cut:], liked[cut:]),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch=512,
        epochs=3,
    )


if __name__ == "__main__":
    mh.train(task)
