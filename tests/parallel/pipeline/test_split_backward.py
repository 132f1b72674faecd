"""Split backward: both parts together give the gradients of one backward pass.

The first part computes no gradient of a weight.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from manyhands.parallel.pipeline.split_backward import backward_inputs


class Tied(nn.Module):
    """One weight in two places, whose biases are listed before it and hang on one place each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.weight = (
            nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in ((5,), (5,), (5, 5))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.weight, self.one).tanh()
        return nn.functional.linear(x, self.weight, self.two).tanh() + x


class Past(nn.Module):
    """Two outputs, one of which no input reaches; one weight is on the way to both, one is not
    used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.alone, self.unused = (
            nn.Linear(5, 5).double(),
            nn.Linear(5, 5).double(),
            nn.Linear(5, 5).double(),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fixed = torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5)
        return self.shared(x).tanh(), self.alone(self.shared(fixed).tanh())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True).double()
        self.norm, self.out = nn.LayerNorm(6).double(), nn.Linear(6, 6).double()
        self.conv = nn.Conv1d(1, 6, 1).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x[:, None]).transpose(1, 2))
        return self.out(y + self.attention(y, y, y)[0]).relu() * self.scale + self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 5)).double(),
    "tied": Tied,
    "past": Past,
    "layers": Layers,
    "no weights": lambda: nn.Sequential(nn.Tanh(), nn.Softmax(1)),
    "batchnorm": lambda: nn.Sequential(
        nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 5)
    ).double(),
}


def outputs_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    got = model(x)
    return list(got) if isinstance(got, tuple) else [got]


@pytest.mark.parametrize("name", MODELS)
def test_both_parts_together_are_the_whole(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(7, 5, dtype=torch.float64)
    for _ in range(2):  # the second micro-batch is added to the first
        outputs = outputs_of(model, whole := x.clone().requires_grad_())
        grads = [torch.randn_like(y) for y in outputs]
        torch.autograd.backward(outputs, grads)
        x = x + 1
    theirs = {n: w.grad for n, w in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(7, 5, dtype=torch.float64)
    for _ in range(2):
        outputs = outputs_of(model, split := x.clone().requires_grad_())
        grads = [torch.randn_like(y) for y in outputs]
        before = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
        edges = [get_gradient_edge(y) for y in outputs]
        (dx,), rest = backward_inputs(edges, grads, [get_gradient_edge(split)], model.parameters())
        assert {n for n, w in model.named_parameters() if w.grad is not None} == before.keys()
        assert all(
            torch.equal(w.grad, before[n])
            for n, w in model.named_parameters()
            if w.grad is not None
        )
        rest()
        x = x + 1
    assert dx is not None and whole.grad is not None
    torch.testing.assert_close(dx, whole.grad, rtol=1e-14, atol=1e-14)
    for n, w in model.named_parameters():
        assert (w.grad is None) == (theirs[n] is None), n
        if w.grad is not None:
            torch.testing.assert_close(
                w.grad, theirs[n], rtol=1e-13, atol=1e-13, msg=lambda m, n=n: f"{n}: {m}"
            )


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[str], name: str) -> Tensor:
        ctx.seen, ctx.name = seen, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.append(ctx.name)
        return grads[0], None, None


def test_no_step_runs_twice_where_every_weight_is_used_once() -> None:
    seen: list[str] = []
    weights = [nn.Parameter(torch.randn(5, 5)) for _ in range(3)]
    x = torch.randn(2, 5, requires_grad=True)
    y: Tensor = x
    for i, w in enumerate(weights):
        y = Counted.apply(y, seen, f"y{i}") @ Counted.apply(w, seen, f"w{i}")
    _, rest = backward_inputs(
        [get_gradient_edge(y)], [torch.ones_like(y)], [get_gradient_edge(x)], weights
    )
    assert seen == ["y2", "y1", "y0"]
    rest()
    assert sorted(seen[3:]) == ["w0", "w1", "w2"]


def test_the_graph_goes_with_the_second_part_without_waiting_for_the_collector() -> None:
    class Noted(Counted):
        @staticmethod
        def forward(ctx: Any, x: Tensor, seen: Any, name: str) -> Tensor:
            alive.add(ctx)
            return Counted.forward(ctx, x, seen, name)

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    model, x = MODELS["linear"](), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    y = model[2](model[1](model[0](Noted.apply(x, [], "inside"))))
    gc.disable()
    try:
        _, rest = backward_inputs(
            [get_gradient_edge(y)], [torch.ones_like(y)], [get_gradient_edge(x)], model.parameters()
        )
        del y
        assert len(alive) == 1
        rest()
        assert len(alive) == 0
    finally:
        gc.enable()
