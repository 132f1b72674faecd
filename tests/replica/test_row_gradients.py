"""Row gradients: a step of the rows that have a gradient has the bits of a whole step.

Rows without one, and what lies beside the parameter in memory, stay out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import TaskError
from manyhands.replica.flat import FlatParameters
from manyhands.replica.row_gradients import FEW, RowGradients, check_rows, leaves_rows

Make = Callable[[Any], Optimizer]
LEAVES: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "foreach sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "decaying adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.5),
}
MOVES: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "weight decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "adagrad with weight decay": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}
SHAPES = {
    "vector": (300,),
    "narrow": (10, 3),
    "table": (200, 16),
    "images": (5, 6, 5, 5),
    "transposed": (31, 7),
}


class Table(nn.Module):
    """The table lies between two others in one flat vector."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.before = nn.Parameter(torch.randn(512, generator=g).to(dtype))
        table = torch.randn(*shape, generator=g).to(dtype)
        if table.ndim == 4:
            table = table.contiguous(memory_format=torch.channels_last)
        if shape == SHAPES["transposed"]:
            table = table.T.contiguous().T  # its rows do not lie together
        self.table = nn.Parameter(table)
        self.after = nn.Parameter(torch.randn(2000, generator=g).to(dtype))


def private(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


@contextmanager
def stepped_by_rows(model: nn.Module, optimizer: Optimizer) -> Iterator[FlatParameters]:
    flat = FlatParameters(model, private, 2**20)
    flat.move({k: v.clone() for k, v in flat.values.items()}, in_common=True)
    hooks = RowGradients(flat, optimizer)
    yield flat
    hooks.close()


def gradient(p: Tensor, rows: list[int], seed: int) -> Tensor:
    found = torch.zeros_like(p)
    g = torch.Generator().manual_seed(seed)
    found[rows] = torch.randn(found[rows].shape, generator=g).to(p.dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LEAVES)
def test_it_has_the_bits_of_a_whole_step_and_touches_nothing_beside_it(
    name: str, shape: str, dtype: torch.dtype
) -> None:
    """One number alone in the gradient of a vector is where torch adds a sparse gradient to a view
    at twice the view's offset."""
    number = SHAPES[shape][0]
    scattered = list(range(1, number, 2))  # of the large ones: more than FEW runs
    for few in ([], [2], [0, 3, 4], scattered, list(range(1, number)), list(range(number))):
        whole, rows = Table(SHAPES[shape], dtype), Table(SHAPES[shape], dtype)
        plain, ours = LEAVES[name](whole.parameters()), LEAVES[name](rows.parameters())
        with stepped_by_rows(rows, ours) as flat:
            for step in range(3):
                for model, optimizer in ((whole, plain), (rows, ours)):
                    model.table.grad = gradient(model.table, few, step)
                    optimizer.step()
            assert torch.equal(rows.table, whole.table)
            assert torch.equal(rows.before, whole.before) and torch.equal(rows.after, whole.after)
            for key, value in plain.state[whole.table].items():
                assert torch.equal(ours.state[rows.table][key], value), key
            flat.take_back()  # nothing has left its place


def seen_by(optimizer: Optimizer) -> list[list[int]]:
    """How many rows each parameter has that the optimizer steps, in each of its steps."""
    seen: list[list[int]] = []
    groups = optimizer.param_groups
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([len(p) for g in groups for p in g["params"] if p.grad is not None])
    )
    return seen


@pytest.mark.parametrize(
    ("rows", "inside"),
    [
        ([5, 9], [1, 1]),
        ([5, 6, 7, 20], [3, 1]),
        (list(range(0, 2 * FEW, 2)), [1] * FEW),
        (list(range(0, 2 * FEW + 1, 2)), [FEW + 1]),  # many: one copy of them
        ([], [0]),
        (list(range(200)), [200]),
    ],
)
def test_the_optimizer_sees_only_rows_with_a_gradient(rows: list[int], inside: list[int]) -> None:
    model = Table((200, 16))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    after: list[Any] = []
    optimizer.register_step_post_hook(lambda o, *_: after.append(o.param_groups[0]["params"]))
    with stepped_by_rows(model, optimizer):
        seen = seen_by(optimizer)
        model.table.grad = gradient(model.table, rows, 0)
        optimizer.step()
    assert seen == [inside]
    assert [id(p) for p in after[0]] == [id(p) for p in model.parameters()], (
        "a hook of the user's after the step has whole parameters"
    )
    assert optimizer.state.keys() == set(model.parameters())
    assert float(optimizer.state[model.table]["step"]) == 1.0


@pytest.mark.parametrize("rows", [[3, 4, 40], list(range(0, 160, 2))], ids=["views", "copy"])
def test_what_another_rank_does_to_the_parameter_meanwhile_is_kept(rows: list[int]) -> None:
    """In rows of this gradient and in others, just before the optimizer's kernel runs."""
    model = Table((200, 16), torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = [1, 3, 4, 12, 63]
    wanted = model.table.detach().clone()
    grad = gradient(model.table, rows, 0)
    wanted[others] += 1.0
    wanted -= 0.1 * grad
    with stepped_by_rows(model, optimizer):

        def step_of_another(*_: Any) -> None:
            model.table.data[others] += 1.0

        hook = optimizer.register_step_pre_hook(step_of_another)
        model.table.grad = grad
        optimizer.step()
        hook.remove()
    torch.testing.assert_close(model.table.data, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_every_row_steps_the_whole_parameter(name: str) -> None:
    whole, rows = Table((10, 3)), Table((10, 3))
    plain, ours = MOVES[name](whole.parameters()), MOVES[name](rows.parameters())
    assert not any(leaves_rows(ours, group) for group in ours.param_groups)
    with stepped_by_rows(rows, ours):
        for step in range(3):
            for model, optimizer in ((whole, plain), (rows, ours)):
                model.table.grad = gradient(model.table, [step], step)
                optimizer.step()
    assert torch.equal(rows.table, whole.table)


def test_a_rank_with_parameters_of_its_own_steps_them_whole() -> None:
    model = Table((10, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = FlatParameters(model, private, 2**20)
    hooks, seen = RowGradients(flat, optimizer), seen_by(optimizer)
    model.table.grad = gradient(model.table, [1], 0)
    optimizer.step()
    assert seen == [[10]]
    hooks.close()


def test_sparse_gradients_stay_sparse_and_write_their_rows_alone() -> None:
    model = nn.Embedding(50, 4, sparse=True)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with stepped_by_rows(model, optimizer):
        model(torch.tensor([3, 3, 7])).sum().backward()
        optimizer.step()
    assert model.weight.grad is not None and model.weight.grad.is_sparse
    assert model.weight[3].tolist() == [-1.0] * 4 and model.weight[7].tolist() == [0.0] * 4
    others = [i for i in range(50) if i not in (3, 7)]
    assert bool((model.weight[others] == 1.0).all())


def test_a_step_that_fails_leaves_the_optimizer_its_parameters() -> None:
    model = Table((10, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fails(*_: Any) -> None:
        raise ArithmeticError

    before = model.table.detach().clone()
    with stepped_by_rows(model, optimizer):
        hook = optimizer.register_step_pre_hook(fails)
        model.table.grad = gradient(model.table, [1], 0)
        with pytest.raises(ArithmeticError):
            optimizer.step()
        hook.remove()
    assert torch.equal(model.table, before)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    optimizer.step()
    assert not torch.equal(model.table, before), "and the hooks are gone"


def test_sparse_gradients_and_momentum_are_refused() -> None:
    model = nn.Embedding(50, 4, sparse=True)
    check_rows(torch.optim.SparseAdam(model.parameters()), model)
    with pytest.raises(TaskError, match="every row that ever had a gradient"):
        check_rows(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
