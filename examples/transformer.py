"""A small transformer that writes like Shakespeare: two layers, 0.4 million parameters.

python examples/transformer.py                                       one process
manyhands run examples/transformer.py data=2 steps=300               two
manyhands verify examples/transformer.py data=3                      are three the same as one?
"""

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands import datasets

BLOCK, WIDTH, HEADS, LAYERS = 64, 128, 4, 2


class Layer(nn.Module):
    """Every character looks back at those before it, then thinks for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        scores = self.head(self.layers(self.token(ids) + self.place(places)))
        return scores.transpose(
            1, 2
        )  # [rows, characters, block]: classes second, as cross_entropy wants them


def task() -> mh.Task:
    train, test, characters = datasets.tinyshakespeare(block=BLOCK)
    return mh.Task(
        model=Transformer(characters),
        loss=nn.functional.cross_entropy,
        train=train,
        test=test,
        optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.01),
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda step: min(1.0, (step + 1) / 50)
        ),
        metrics={"accuracy": mh.accuracy},
        batch=32,
        clip=1.0,
        epochs=1,
    )


if __name__ == "__main__":
    mh.train(task)
