"""Tied weights: an encoder and a decoder that reverse lines of Shakespeare.

One matrix embeds both texts and writes the answer, so it is needed on the first and the last stage
of a pipeline; every layer of the decoder reads the encoder's output.

python examples/tied.py                                 one process
manyhands run examples/tied.py pipe=2                   two stages
manyhands run examples/tied.py pipe=2 shard=2 zero=1    four: the optimizer's state sharded too
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands import datasets

BLOCK, DIM, HEADS = 24, 48, 4


class Layer(nn.Module):
    def __init__(self, decodes: bool) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.across = nn.MultiheadAttention(DIM, HEADS, batch_first=True) if decodes else None
        self.norm1, self.norm2, self.norm3 = (
            nn.LayerNorm(DIM),
            nn.LayerNorm(DIM) if decodes else None,
            nn.LayerNorm(DIM),
        )
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM))

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        y = self.norm1(x)
        x = x + self.own(y, y, y, attn_mask=mask, need_weights=False)[0]
        if self.across is not None and self.norm2 is not None:
            x = x + self.across(self.norm2(x), memory, memory, need_weights=False)[0]
        return x + self.mlp(self.norm3(x))


class Turner(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = (
            nn.Embedding(characters, DIM),
            nn.Parameter(0.02 * torch.randn(BLOCK, DIM)),
        )
        self.encoder = nn.ModuleList([Layer(decodes=False) for _ in range(2)])
        self.decoder = nn.ModuleList([Layer(decodes=True) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, characters, bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        self.head.weight = self.characters.weight
        self.register_buffer(
            "mask", torch.triu(torch.full((BLOCK, BLOCK), float("-inf")), 1), persistent=False
        )

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        memory = self.characters(source) + self.places
        for layer in self.encoder:
            memory = layer(memory)
        x = self.characters(before) + self.places
        for layer in self.decoder:
            x = layer(x, memory, self.mask)
        return self.head(self.norm(x))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def turned(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of text, what was written of the answer so far, and the answer: the row from its end."""
    rows = pair[0]
    answer = rows.flip(1)
    return rows, answer.roll(1, 1), answer


def task() -> mh.Task:
    name, train, test, characters = datasets.text(block=BLOCK)
    return mh.Task(
        name=f"turning lines of {name} around",
        model=Turner(characters),
        loss=loss,
        train=turned(train),
        test=turned(test),
        optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3),
        batch=64,
        epochs=1,
    )


if __name__ == "__main__":
    mh.train(task)
