"""One GPU: `manyhands.train` against hand-written loops.

GPT-2-small shape in bf16 against the compiled loop, and with activations computed again
(recompute=true) against torch.utils.checkpoint around every block; LeNet against the plain loop
(kernel launches bound it) and, where installed, Lightning Fabric.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from common import Claim, alternate, median
from data_parallel import lenet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands import datasets


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (
            z.view(b, t, self.heads, w // self.heads).transpose(1, 2)
            for z in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(
            scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w)
        )
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 small: 12 blocks of width 768, 12 heads, context 1024, vocabulary rounded up to a
    multiple of 64.
    """

    def __init__(
        self,
        vocabulary: int = 50304,
        width: int = 768,
        heads: int = 12,
        depth: int = 12,
        context: int = 1024,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(rows: int = 512, length: int = 1024) -> tuple[Tensor, Tensor]:
    ids = torch.randint(50257, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Timed(mh.Callback):
    def __init__(self, first: int, last: int):
        self.first, self.last = first, last

    def on_round(self, run: Any, round: int, loss: Any) -> None:
        if round in (self.first, self.last):
            torch.cuda.synchronize()
            now = time.perf_counter()
            if round == self.first:
                self.start = now
            else:
                run.trainer.metrics = {"seconds": now - self.start}


def ours(task: Callable[[], mh.Task], words: str, warm: int, steps: int) -> float:
    """Steps per second."""
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        result = mh.train(
            task,
            f"{words} device=cuda save=off steps={warm + steps}",
            directory=f"{folder}/run",
            quiet=True,
            callbacks=(Timed(warm, warm + steps),),
        )
    return steps / result.metrics["seconds"]


def by_hand(
    make: Callable[[], nn.Module],
    optimizer: Any,
    loss: Any,
    values: tuple[Tensor, Tensor],
    batch: int,
    warm: int,
    steps: int,
    bf16: bool,
    compiled: bool,
    fabric: bool = False,
    again: bool = False,
) -> float:
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = make().cuda()
    if again:
        for block in cast(GPT, model).blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    opt = optimizer(model.parameters())
    net = torch.compile(model) if compiled else model
    backward = Tensor.backward
    if fabric:
        from lightning.fabric import Fabric

        whole = Fabric(accelerator="cuda", devices=1)
        net, opt = whole.setup(net, opt)
        backward = whole.backward
    x, y = (v.cuda() for v in values)
    order, at, start = torch.randperm(len(x), device="cuda"), 0, 0.0
    for step in range(warm + steps):
        if step == warm:
            torch.cuda.synchronize()
            start = time.perf_counter()
        if at + batch > len(x):
            order, at = torch.randperm(len(x), device="cuda"), 0
        index = order[at : at + batch]
        at += batch
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            value = loss(net(x[index]), y[index])
        backward(value)
        opt.step()
    torch.cuda.synchronize()
    return steps / (time.perf_counter() - start)


def measure(quick: bool, only: list[str]) -> list[Claim]:
    if not torch.cuda.is_available():
        bars = {"gpt2": 1.0, "recompute": 0.99, "lenet": 4.0}
        return [
            Claim(name, skipped="no GPU here", bar=bar)
            for name, bar in bars.items()
            if not only or name in only
        ]
    torch.set_float32_matmul_precision("high")  # for both sides alike
    claims, times = [], 1 if quick else 3
    if not only or "lenet" in only:
        images = datasets.images()[1]
        steps = 100 if quick else 2000

        def lenet_task() -> mh.Task:
            return mh.Task(model=lenet(), loss=cross_entropy, train=images, optimizer=sgd, batch=64)

        hand = functools.partial(
            by_hand, lenet, sgd, cross_entropy, images, 64, 50, steps, False, False
        )
        runs = {"ours": functools.partial(ours, lenet_task, "", 50, steps), "hand-written": hand}
        if importlib.util.find_spec("lightning") is not None:
            runs["Lightning Fabric"] = functools.partial(hand, fabric=True)
        found = alternate(runs, times)
        rate = {k: median(v) for k, v in found.items()}
        detail = {"all runs": {k: [round(x) for x in v] for k, v in found.items()}}
        claims.append(
            Claim(
                "lenet",
                rate["ours"],
                rate["hand-written"],
                "steps/s",
                rate["ours"] / rate["hand-written"],
                4.0,
                detail,
            )
        )
    if not only or "gpt2" in only:
        rows, steps = tokens(), 5 if quick else 30

        def gpt_task() -> mh.Task:
            return mh.Task(model=GPT(), loss=token_loss, train=rows, optimizer=adamw, batch=32)

        shape = functools.partial(by_hand, GPT, adamw, token_loss, rows, 32, 10, steps, True)
        found = alternate(
            {
                "ours": functools.partial(ours, gpt_task, "precision=bf16 compile=true", 10, steps),
                "hand-written, compiled": functools.partial(shape, True),
                "hand-written": functools.partial(shape, False),
            },
            times,
        )
        rate = {k: median(v) * 32 * 1024 for k, v in found.items()}
        detail = {
            "hand-written, eager": f"{rate['hand-written']:,.0f} tokens/s",
            "all runs": {k: [round(x * 32768) for x in v] for k, v in found.items()},
        }
        claims.append(
            Claim(
                "gpt2",
                rate["ours"],
                rate["hand-written, compiled"],
                "tokens/s",
                rate["ours"] / rate["hand-written, compiled"],
                1.0,
                detail,
            )
        )
    if not only or "recompute" in only:
        rows, steps = tokens(), 5 if quick else 30

        def again_task() -> mh.Task:
            return mh.Task(model=GPT(), loss=token_loss, train=rows, optimizer=adamw, batch=32)

        found = alternate(
            {
                "ours": functools.partial(
                    ours, again_task, "precision=bf16 recompute=true", 10, steps
                ),
                "hand-written": functools.partial(
                    by_hand, GPT, adamw, token_loss, rows, 32, 10, steps, True, False, again=True
                ),
            },
            times,
        )
        rate = {k: median(v) * 32 * 1024 for k, v in found.items()}
        detail = {"all runs": {k: [round(x * 32768) for x in v] for k, v in found.items()}}
        claims.append(
            Claim(
                "recompute",
                rate["ours"],
                rate["hand-written"],
                "tokens/s",
                rate["ours"] / rate["hand-written"],
                0.99,
                detail,
            )
        )
    return claims
