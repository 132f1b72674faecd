"""A GPT on Shakespeare, split in three ways at once, though nothing in the model knows of it.

python examples/gpt.py                                    one process
manyhands run examples/gpt.py data=2 tensor=2 pipe=2      eight: 2 replicas x 2 stages x 2 shards
manyhands verify examples/gpt.py data=2 tensor=2 pipe=2   they compute what one process does
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands import datasets

BLOCK, DIM, HEADS, LAYERS = 64, 64, 4, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        q, k, v = (
            part.view(batch, time, HEADS, dim // HEADS).transpose(1, 2)
            for part in self.qkv(x).split(dim, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, dim))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(DIM), Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, DIM), nn.Embedding(BLOCK, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, characters, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        self.head.weight = self.characters.weight  # one matrix reads and writes characters

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_character(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def task() -> mh.Task:
    name, train, test, characters = datasets.text(block=BLOCK)
    return mh.Task(
        name=f"GPT on {name}",
        model=GPT(characters),
        loss=next_character,
        train=train,
        test=test,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        batch=32,
        epochs=1,
        clip=1.0,
    )


if __name__ == "__main__":
    mh.train(task)
