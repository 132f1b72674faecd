"""Gather of rows: gradients for ids in any order, in memory that the caller gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import manyhands as mh
from manyhands.embedding.gather import bags_of, rows_of
from manyhands.embedding.tables import EmbeddingTables
from support.servers import joined, servers


@settings(deadline=None)  # kernels compile
@given(st.integers(1, 12), st.sampled_from([1, 3]), st.lists(st.integers(0, 11), max_size=30))
def test_gradients_of_rows_are_those_of_torch_for_any_order(
    count: int, dim: int, wanted: list[int]
) -> None:
    index = torch.tensor([i % count for i in wanted], dtype=torch.int64)
    rows = torch.randn(count, dim, dtype=torch.float64, requires_grad=True)
    outer = torch.randn(len(index), dim, dtype=torch.float64)
    (expected,) = torch.autograd.grad(F.embedding(index, rows), rows, outer)
    where: list[int] = []

    def room() -> Tensor:
        made = torch.full_like(rows, torch.nan).detach()
        where.append(made.data_ptr())
        return made

    rows_of(rows, index, room).backward(outer)
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, expected)
    assert rows.grad.data_ptr() == where[0], "not copied"


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dim", [1, 4])
def test_gradients_of_bags_are_written_over_what_the_memory_held(mode: str, dim: int) -> None:
    index, starts = torch.tensor([2, 0, 2, 4, 1]), torch.tensor([0, 2, 2, 3])
    rows = torch.randn(6, dim, requires_grad=True)
    outer = torch.randn(4, dim)
    other = F.embedding_bag(index, rows, starts, mode=mode)
    (expected,) = torch.autograd.grad(other, rows, outer)
    room = lambda: torch.full_like(rows, torch.nan).detach()
    bags_of(rows, index, starts, mode, None, room).backward(outer)
    torch.testing.assert_close(rows.grad, expected)


@pytest.mark.parametrize("transport", ["tcp", "shared"])
def test_gradients_of_an_embedding_are_pushed_from_where_backward_wrote_them(
    transport: str,
) -> None:
    module = mh.Embedding("users", 8, optimizer="sgd", lr=1.0, init="zeros")
    ids = torch.tensor([[5, 7, 5], [9, 7, 5]])
    with servers() as (server,), joined(server, transport=transport) as store:
        tables = EmbeddingTables(module, store, ids=lambda batch: {"users": batch})
        tables.attach()
        for _ in range(2):
            tables.begin(ids)
            module(ids).sum().backward()
            ((_, gradient),) = tables._grads["users"]
            assert gradient.data_ptr() in store._sender.buffers._blocks
            del gradient
            tables.push()
        tables.flush()
        found = store.pull({"users": torch.tensor([5, 7, 9])})["users"]
        assert found[:, 0].tolist() == [-6.0, -4.0, -2.0]
        tables.close()
