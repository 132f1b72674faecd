"""The optimizer mh.LBFGS by itself: minima of hard functions, its state, and what it refuses."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.plan.static_memory import optimizer_bytes
from manyhands.replica import state

Loss = Callable[[Tensor], Tensor]


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def beale(x: Tensor) -> Tensor:
    a, b = x
    return (1.5 - a + a * b) ** 2 + (2.25 - a + a * b * b) ** 2 + (2.625 - a + a * b * b * b) ** 2


class Minimiser:
    """An optimizer on one vector, and how often it has evaluated."""

    def __init__(self, loss: Loss, start: list[float], dtype: Any = torch.float64, **options: Any):
        self.x = nn.Parameter(torch.tensor(start, dtype=dtype))
        self.loss, self.optimizer = loss, mh.LBFGS([self.x], **options)
        self.evaluations = 0

    def closure(self) -> Tensor:
        self.evaluations += 1
        self.x.grad = None
        loss = self.loss(self.x)
        loss.backward()
        return loss

    def step(self, steps: int = 1) -> float:
        for _ in range(steps):
            loss = self.optimizer.step(self.closure, self.optimizer.can_continue())
        return loss


# -- minima --


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("loss", "start", "minimum"),
    [
        (rosenbrock, [-1.2, 1.0], [1.0, 1.0]),
        (rosenbrock, [-1.2, 1.0] * 5, [1.0] * 10),
        (beale, [1.0, 1.0], [3.0, 0.5]),
    ],
    ids=["rosenbrock", "rosenbrock of ten", "beale"],
)
def test_it_finds_the_minimum_of_curved_valleys(
    loss: Loss, start: list[float], minimum: list[float], dtype: Any
) -> None:
    found = Minimiser(loss, start, dtype)
    found.step(100)
    tolerance = 1e-7 if dtype == torch.float64 else 2e-2
    assert torch.allclose(found.x, torch.tensor(minimum, dtype=dtype), atol=tolerance)


def test_no_step_raises_the_loss() -> None:
    found = Minimiser(rosenbrock, [-1.2, 1.0, -0.5, 2.0])
    losses = [found.step() for _ in range(50)]
    assert losses == sorted(losses, reverse=True)


def test_a_step_that_continues_costs_one_evaluation_where_the_first_trial_holds() -> None:
    found = Minimiser(lambda x: (x * x * torch.tensor([1.0, 3.0])).sum(), [5.0, 4.0])
    found.step(6)
    before = found.evaluations
    found.step()
    assert found.evaluations == before + 1


def test_steps_that_do_not_continue_evaluate_at_their_start_and_find_the_same() -> None:
    one, two = (Minimiser(rosenbrock, [-1.2, 1.0]) for _ in range(2))
    one.step(12)
    for _ in range(12):
        two.optimizer.step(two.closure)
    assert torch.equal(one.x, two.x)
    assert two.evaluations == one.evaluations + 11


def test_a_parameter_that_somebody_moved_is_seen() -> None:
    found = Minimiser(rosenbrock, [-1.2, 1.0])
    found.step(3)
    assert found.optimizer.can_continue()
    found.x.data.add_(0.1)
    assert not found.optimizer.can_continue()


def test_at_a_minimum_it_stays_and_evaluates_no_more() -> None:
    found = Minimiser(lambda x: (x * x).sum() + 1.0, [3.0, 4.0])
    found.step(5)
    there, before = found.x.clone(), found.evaluations
    found.step(5)
    assert torch.equal(found.x, there) and found.evaluations == before


def test_a_minimum_that_rounding_hides_ends_the_search() -> None:
    """In float32 the loss near the minimum of 1e4 + x^2 does not change any more."""
    found = Minimiser(lambda x: 1e4 + (x * x).sum(), [3.0, 4.0], torch.float32)
    found.step(12)
    before = found.evaluations
    found.step(3)
    assert found.x.abs().max() < 0.2
    assert found.evaluations - before <= 3


def test_a_loss_or_gradient_that_is_not_finite_moves_nothing_and_is_told() -> None:
    for wrong in (math.nan, math.inf):
        found = Minimiser(lambda x, w=wrong: (x * w).sum(), [1.0, 2.0])
        assert math.isnan(found.step())
        assert found.x.tolist() == [1.0, 2.0]


def test_parameters_without_a_gradient_and_frozen_ones_stay() -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad = False
    optimizer = mh.LBFGS([used, unused, frozen])

    def closure() -> Tensor:
        used.grad = None
        loss = ((used * frozen - 3) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert torch.allclose(used, torch.full((2,), 3.0))
    assert unused.tolist() == frozen.tolist() == [1.0, 1.0]


def test_a_memory_format_is_kept() -> None:
    """Vectors are in logical order, whatever the strides of a parameter are."""

    def trained(weight: Tensor) -> Tensor:
        p = nn.Parameter(weight)
        optimizer = mh.LBFGS([p])

        def closure() -> Tensor:
            p.grad = None
            loss = ((p - torch.linspace(-1, 1, p.numel()).view(p.shape)).cosh()).sum()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        return p.detach()

    plain = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    last = trained(plain.to(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(last, trained(plain.clone()))


def test_it_is_bfgs_while_the_history_has_room() -> None:
    """On a quadratic, with exact enough searches, the minimum takes about as many steps as there
    are dimensions."""
    n = 12
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(n, n, generator=generator, dtype=torch.float64)
    A = root @ root.T / n + torch.eye(n, dtype=torch.float64)
    found = Minimiser(lambda x: x @ A @ x / 2 - x.sum(), [0.0] * n, history=2 * n, c2=1e-3)
    found.step(n + 1)
    minimum = torch.linalg.solve(A, torch.ones(n, dtype=torch.float64))
    assert torch.allclose(found.x, minimum, atol=1e-6)


# -- state --


def saved(optimizer: mh.LBFGS, module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As a checkpoint has it: tensors by name, and JSON."""
    tensors, meta = state.optimizer_state(module, optimizer)
    return tensors, json.loads(json.dumps(meta))


@pytest.mark.parametrize("steps", [1, 4, 9, 14])
def test_a_saved_state_goes_on_bit_for_bit(steps: int) -> None:
    def begun() -> tuple[Minimiser, nn.Module]:
        made = Minimiser(rosenbrock, [-1.2, 1.0, 0.3], history=4)
        module = nn.Module()
        module.x = made.x
        return made, module

    (whole, module), (half, other) = begun(), begun()
    whole.step(steps)
    kept = saved(whole.optimizer, module)
    half.x.data.copy_(whole.x)
    whole.step(6)
    state.load_optimizer(other, half.optimizer, *kept)
    assert half.optimizer.can_continue()
    half.step(6)
    assert torch.equal(half.x, whole.x)
    ours, theirs = saved(half.optimizer, other), saved(whole.optimizer, module)
    assert ours[1] == theirs[1] and ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(ours[0][k], theirs[0][k]) for k in ours[0])


def test_a_state_dict_and_a_copy_go_on_alike() -> None:
    one, two = (Minimiser(rosenbrock, [-1.2, 1.0]) for _ in range(2))
    one.step(5)
    two.x.data.copy_(one.x)
    two.optimizer.load_state_dict(one.optimizer.state_dict())
    three = copy.deepcopy(one)
    for minimiser in (one, two, three):
        minimiser.step(5)
    assert torch.equal(one.x, two.x) and torch.equal(one.x, three.x)


def test_the_state_holds_at_most_the_vectors_that_are_forecast() -> None:
    found = Minimiser(rosenbrock, [-1.2, 1.0], history=3)
    found.step(10)
    held = found.optimizer.state[found.x]
    assert set(held) == set(found.optimizer.per_element)
    assert len(held) + 1 == found.optimizer.state_vectors == 8
    module = nn.Module()
    module.x = found.x
    kept, work, notes = optimizer_bytes(module, found.optimizer)
    assert (kept, work, notes) == ({"x": 8 * found.x.nbytes}, 3 * found.x.nbytes, ())


# -- refusals --


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 0}, "LBFGS got lr=0, but more than 0 is needed"),
        ({"history": 0}, "LBFGS got history=0, but 1 pair or more is needed"),
        ({"c1": 0.9, "c2": 0.1}, r"LBFGS got c1, c2=\(0.9, 0.1\), but 0 < c1 < c2 < 1 is needed"),
        ({"max_evaluations": 0}, "LBFGS got max_evaluations=0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(mh.TaskError, match=says):
        mh.LBFGS([nn.Parameter(torch.ones(2))], **options)


def test_groups_and_mixed_dtypes_are_refused() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(mh.TaskError, match="2 parameter groups"):
        mh.LBFGS([{"params": [a]}, {"params": [b]}])
    with pytest.raises(mh.TaskError, match="2 dtypes"):
        mh.LBFGS([a, b])


def test_a_step_without_a_closure_is_refused() -> None:
    with pytest.raises(TypeError, match="needs closure"):
        mh.LBFGS([nn.Parameter(torch.ones(2))]).step()
