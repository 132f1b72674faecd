"""A small GPT as people write it.

Fused qkv, a view by the number of heads, and one matrix for the first and the last layer.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh

VOCABULARY, CONTEXT = 29, 12


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.n_head, self.n_embd, self.dropout = heads, dim, dropout
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), Attention(dim, heads, dropout)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        dim: int = 16,
        heads: int = 4,
        layers: int = 4,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(CONTEXT, dim)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(dim, heads, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight  # tied
        nn.init.normal_(self.wte.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def task():
    chance = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    text = torch.randint(VOCABULARY, (64, CONTEXT + 1), generator=chance)
    x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return mh.Task(
        model=GPT(),
        loss=loss,
        train=(x, y),
        test=(x[:24], y[:24]),
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
        batch=8,
    )
