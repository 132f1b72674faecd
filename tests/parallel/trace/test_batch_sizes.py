"""A traced program is right for micro-batches of other sizes than the one it was traced with.

The last micro-batch of an epoch is smaller, and ranks have unequal ones.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.errors import TaskError
from manyhands.parallel.dataflow.common_subexpressions import without_common_subexpressions
from manyhands.parallel.dataflow.graph_nodes import trace_finely
from manyhands.parallel.trace.program import Input, TracedProgram, resolve, run_node
from manyhands.parallel.trace.symbolic_sizes import SizeGuard

WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    """As in vit-pytorch, CCT and Llama: projections without bias, heads cut out by sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # sizes of what a projection returned, as einops takes them
        q, k, v = (
            y.reshape(y.shape[0], y.shape[1], HEADS, -1).transpose(1, 2)
            for y in self.qkv(x).chunk(3, dim=-1)
        )
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(y.shape[0], y.shape[2], WIDTH))


class Vision(nn.Module):
    """Patches by reshape, a class token, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Linear(12, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        patches = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).flatten(3)
        y = self.patch(patches.reshape(b, -1, 4 * c))
        y = torch.cat([self.token.expand(b, -1, -1), y], dim=1)
        for block in self.blocks:
            y = y + block(y)
        return self.head(y[:, 0])


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * angles.view(1, pairs.shape[1], 1, pairs.shape[-1])
    return torch.view_as_real(turned).flatten(3)


class Language(nn.Module):
    """Rotary embeddings as complex numbers, fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1])).double()
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: Tensor) -> Tensor:
        (b, t), x = ids.shape, self.tokens(ids)
        angles = self.angles[:t]  # type: ignore[index]
        q = rotated(self.q(x).view(b, t, 2, 4), angles).transpose(1, 2)
        k = rotated(self.k(x).view(b, t, 1, 4), angles).transpose(1, 2)
        v = self.v(x).view(b, t, 1, 4).transpose(1, 2)
        k, v = (y.expand(b, 2, t, 4).reshape(b, 2, t, 4) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.o(y.transpose(1, 2).contiguous().view(b, t, -1)))


class Spectrum(nn.Module):
    """A Fourier transform between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * (WIDTH // 2 + 1), 1)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.view_as_real(torch.fft.rfft(self.first(x)))
        return self.last(found.reshape(*x.shape[:2], -1))


def images(rows: int) -> Tensor:
    return torch.randn(rows, 3, 4, 4, dtype=torch.float64)


MODELS: dict[str, tuple[type[nn.Module], Callable[[int], Tensor]]] = {
    "vision": (Vision, images),
    "language": (Language, lambda rows: torch.randint(11, (rows, 6))),
    "spectrum": (Spectrum, lambda rows: torch.randn(rows, 5, WIDTH, dtype=torch.float64)),
}


def computed(traced: TracedProgram, x: Tensor) -> Tensor:
    traced.size_guards[True]((x,))
    known: dict[str, Tensor] = {}
    for node in traced.nodes[True]:
        known[node.name] = run_node(traced.model, node, (x,), known)
    output: Tensor = resolve(traced.model, traced.output[True], (x,), known)
    return output


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_program_traced_with_some_rows_is_the_model_for_any_number(name: str, rows: int) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    whole = make().double()
    traced = without_common_subexpressions(trace_finely(whole, (batch(rows),), 2))
    assert len(traced.nodes[True]) > 3  # its operators, not the model as one node
    for other in (1, 2, 3, 4, 7):
        x = batch(other)
        assert torch.equal(computed(traced, x), whole(x)), other


def test_a_size_that_became_a_number_binds_a_batch_of_one_row_too() -> None:
    rows = sympy.Symbol("rows", positive=True, integer=True)
    guard = SizeGuard({Input(0, 0): (rows, 7)}, [], [(sympy.Eq(rows, 2), "there")], {})
    guard((torch.zeros(2, 7),))
    with pytest.raises(TaskError, match=r"batch of shape \(1, 7\).*asked for near there"):
        guard((torch.zeros(1, 7),))
