"""Models with branches, and their partition over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core import Group
from manyhands.parallel.dataflow.common_subexpressions import without_common_subexpressions
from manyhands.parallel.dataflow.graph_executor import GraphExecutor
from manyhands.parallel.dataflow.graph_nodes import FIELDS, trace_finely
from manyhands.parallel.dataflow.partition import GraphPartition, partition
from manyhands.replica.objective import Objective
from support.pipelines import in_zoo


class Towers(nn.Module):
    """Two inputs, a tower for each, which meet at the end."""

    def __init__(self, width: int = 8, depth: int = 3):
        super().__init__()
        sizes = [6, *[width] * depth]
        self.left = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes))
        )
        self.right = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes))
        )
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), self.right(y)], 1))


class Mixed(nn.Module):
    """Four branches of different lengths out of one value, joined by channels; with running
    statistics.
    """

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.one = nn.Conv2d(channels, out, 1)
        self.three = nn.Sequential(
            nn.Conv2d(channels, out, 1), nn.ReLU(inplace=True), nn.Conv2d(out, out, 3, padding=1)
        )
        self.five = nn.Sequential(
            nn.Conv2d(channels, out, 1),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 5, padding=2),
        )
        self.pool = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(nn.functional.max_pool2d(x, 3, 1, 1))
        return torch.cat([self.one(x), self.three(x), self.five(x), pooled], 1).relu()


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Mixed(4, 3), Mixed(12, 4)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu_()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def branched(name: str) -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    """A model in float64 with its loss and its data: of the zoo, or one with branches."""
    if name not in ("towers", "inception"):
        return in_zoo(name)
    chance = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = (Towers() if name == "towers" else Inception()).double()
    shapes = [(6,), (6,)] if name == "towers" else [(1, 6, 6)]
    data = [torch.randn(64, *shape, generator=chance, dtype=torch.float64) for shape in shapes]
    return model, nn.functional.cross_entropy, (*data, torch.randint(5, (64,), generator=chance))


def partition_of(
    model: nn.Module, example: tuple[Any, ...], ranks: int, micros: int = 4, **more: Any
) -> GraphPartition:
    """Partitioned by made-up costs, equal in every process: a node with parameters takes 1 ms."""
    traced = without_common_subexpressions(trace_finely(model, example, ranks))
    numbers: Sequence[int] = [
        n
        for step, has in zip(traced.nodes[True], trainable(traced), strict=True)
        for n in (10**6 * has + 10, 8, 8)
    ]
    assert len(numbers) == FIELDS * len(traced.nodes[True])
    return partition(traced, numbers, ranks, micros, **more)


def trainable(traced: Any) -> list[bool]:
    return [traced.trains_parameters(node) for node in traced.nodes[True]]


def graphed(
    group: Group,
    partitioned: GraphPartition,
    loss: Callable[..., Tensor] | None = None,
    step: Any = None,
    **more: Any,
) -> GraphExecutor:
    return GraphExecutor(partitioned, group, objective=Objective(loss, step), **more)
