"""An encoder and a decoder with two inputs.

Every layer of the decoder reads the encoder's output, on whatever stage it runs.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh

VOCABULARY, LENGTH, DIM, HEADS = 23, 7, 16, 4


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.own = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.across = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.own(y, y, y, attn_mask=mask, need_weights=False)[0]
        x = x + self.across(self.norm2(x), memory, memory, need_weights=False)[0]
        return x + self.down(F.relu(self.up(self.norm3(x))))


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, DIM)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, DIM))
        self.encoders = nn.ModuleList([Encoder(), Encoder()])
        self.decoders = nn.ModuleList([Decoder(), Decoder()])
        self.out = nn.Linear(DIM, VOCABULARY)
        self.register_buffer("mask", torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.words(source) + self.places
        for encoder in self.encoders:
            memory = encoder(memory)
        x = self.words(target) + self.places
        for decoder in self.decoders:
            x = decoder(x, memory, self.mask)
        return self.out(x)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def task():
    chance = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    source, text = (
        torch.randint(VOCABULARY, (64, LENGTH), generator=chance),
        torch.randint(VOCABULARY, (64, LENGTH + 1), generator=chance),
    )
    return mh.Task(
        model=Seq2Seq(),
        loss=loss,
        train=(source, text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        test=(source[:24], text[:24, :-1].contiguous(), text[:24, 1:].contiguous()),
        optimizer=lambda p: torch.optim.Adam(p, lr=3e-3),
        batch=8,
    )
