"""Matrix factorisation by Hogwild!: ranks share two embedding tables and step the rows they touch.

manyhands run examples/hogwild_factorise.py                         one process
manyhands run examples/hogwild_factorise.py data=2 merge=hogwild    two ranks, one model in memory

A batch touches few rows (`sparse=True`), so two ranks seldom write the same one at once. The ids of
`factorise.py` are raw 64-bit numbers, which need `mh.Embedding` and servers; here ids are rows.
"""

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh

USERS, ITEMS, RATINGS, DIM, ZIPF = 100_000, 20_000, 400_000, 16, 1.05


class Factorise(nn.Module):
    """like(u, i) = <p_u, q_i> + b"""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, DIM, sparse=True)
        self.items = nn.Embedding(ITEMS, DIM, sparse=True)
        self.bias = nn.Parameter(torch.zeros(()))
        for table in (self.users, self.items):
            nn.init.uniform_(table.weight, -0.3, 0.3)

    def forward(self, who: Tensor, what: Tensor) -> Tensor:
        return (self.users(who) * self.items(what)).sum(-1) + self.bias


def zipf(dice: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Rows below n of which the k-th comes with probability ~ k^-ZIPF, by inverting the
    distribution of the continuous law.
    """
    bound = n ** (1 - ZIPF)
    drawn = (1 - dice.random(size) * (1 - bound)) ** (1 / (1 - ZIPF))
    return np.minimum(drawn.astype(np.int64), n) - 1


def ratings(size: int = RATINGS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Who, what, and by how much: a rank-4 truth plus noise."""
    dice = np.random.default_rng(seed)
    users, items = zipf(dice, USERS, size), zipf(dice, ITEMS, size)
    truth = np.stack(
        [np.sin(users * f + 1.3) * np.cos(items * f * 1.7) for f in (0.7, 1.1, 1.9, 2.3)]
    ).sum(0)
    liked = truth + 3 + 0.1 * dice.normal(size=size)
    return torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(liked).float()


def task() -> mh.Task:
    who, what, liked = ratings()
    cut = len(who) * 9 // 10
    return mh.Task(
        name=f"matrix factorisation, {len(who):,} ratings of {USERS:,} users and {ITEMS:,} items",
        model=Factorise(),
        loss=nn.functional.mse_loss,
        train=(who[:cut], what[:cut], liked[:cut]),
        test=(who[cut:], what[cut:], liked[cut:]),
        optimizer=lambda p: torch.optim.Adagrad(p, lr=0.3),
        batch=512,
        epochs=3,
    )


if __name__ == "__main__":
    mh.train(task)
