"""What loss= and step= return is a loss, or a loss and its count; anything else is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, cross_entropy, mse_loss

from manyhands.errors import TaskError
from manyhands.replica.checks import reduction_check
from manyhands.replica.objective import Objective

X, Y = torch.randn(8, 3), torch.arange(8) % 2
NET = nn.Linear(3, 2)
BATCH = (X, Y)


def of_step(returned: Any, count: int = 8) -> tuple[Tensor, int]:
    return Objective(step=lambda model, batch: returned(model(batch[0])))(NET, BATCH, count)


@pytest.mark.parametrize("given", [5, 5.0, torch.tensor(5), torch.tensor(5.0)])
def test_a_count_may_be_any_whole_number(given: Any) -> None:
    loss, count = of_step(lambda out: (out.mean(), given))
    assert count == 5 and loss.requires_grad


def test_a_batch_of_padding_counts_nothing() -> None:
    assert of_step(lambda out: (out.mean(), 0))[1] == 0
    assert of_step(lambda out: (out.mean(), 7), count=0)[1] == 0, "nor does a borrowed sample"


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda out: (out.mean(), out.pow(2).mean()), "as the loss's count a tensor with a grad"),
        (lambda out: (out.mean(), out.pow(2).mean().detach()), r"a torch.float32 tensor \("),
        (lambda out: (out.mean(), 0.25), "count 0.25, but a whole number"),
        (lambda out: (out.mean(), 0.0), "count 0.0, but a whole number"),
        (lambda out: (out.mean(), torch.zeros(())), "but a whole number of samples"),
        (lambda out: (out.mean(), -3), "count -3, but at least 1"),
        (lambda out: (out.mean(), True), "count True, but a whole number"),
        (lambda out: (out.mean(), out), r"a tensor of shape \(8, 2\)"),
        (lambda out: (out.mean(), {"acc": 1}), "count a dict"),
        (lambda out: (out.mean(), out, 8), "returned 3 values"),
        (lambda out: {"loss": out.mean()}, "returned a dict, .* return its loss"),
        (lambda out: out.mean().item(), r"returned -?\d.*but a tensor with the loss"),
        (lambda out: None, "returned None, but a tensor"),
        (lambda out: out.mean().detach(), "a loss without a gradient: it was detached"),
        (lambda out: out, r"the loss has shape \(8, 2\), but one number"),
    ],
)
def test_other_return_values_of_a_step_are_refused(returned: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        of_step(returned)


def test_a_sum_becomes_a_mean_over_its_count() -> None:
    def summed(outputs: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(outputs, target, reduction="sum")

    mean, count = Objective(summed, reduction="sum")(NET, BATCH, 8)
    torch.testing.assert_close(mean, cross_entropy(NET(X), Y))
    assert count == 8


# -- what a loss looks like --


def vae(out: Tensor, x: Tensor) -> Tensor:
    rebuilt = binary_cross_entropy(out.sigmoid(), x, reduction="sum")
    return rebuilt - 0.5 * torch.sum(1 + out - out.pow(2) - out.exp())


def contrastive(out: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(out @ out.T, torch.arange(len(out)))


def weighted(out: Tensor, x: Tensor) -> Tensor:
    return cross_entropy(out, torch.arange(len(out)) % 3 % 2, weight=torch.arange(1.0, 6.0))


@pytest.mark.parametrize(
    ("loss", "halves", "graph"),
    [
        (lambda o, t: mse_loss(o, t), "mean", "mean"),
        (lambda o, t: mse_loss(o, t, reduction="sum"), "sum", "sum"),
        (lambda o, t: (o - t).pow(2).sum(), "sum", "sum"),
        (lambda o, t: (o - t).pow(2).sum(1).mean(), "mean", "mean"),
        (lambda o, t: (o - t).pow(2).sum() / len(o), "mean", None),
        (vae, "sum", "sum"),
        (contrastive, "uneven", "mean"),
        (weighted, "uneven", "mean"),
    ],
)
def test_the_halves_of_a_batch_and_the_graph_tell_a_sum_from_a_mean(
    loss: Any, halves: str | None, graph: str | None
) -> None:
    torch.manual_seed(1)
    outputs, target = torch.randn(16, 5, requires_grad=True), torch.rand(16, 5)
    full = loss(outputs, target)
    assert reduction_check.of_halves(loss, full, outputs, target) == halves
    assert reduction_check.of_graph(full, 16) == graph


def test_a_warning_is_given_where_the_looks_contradict_the_word_only() -> None:
    assert reduction_check.warning("mean", "sum") == reduction_check.IS_SUM
    assert reduction_check.warning("sum", "mean") == reduction_check.IS_MEAN
    assert reduction_check.warning("mean", None) is None
    assert reduction_check.warning("mean", "uneven") == reduction_check.IS_UNEVEN
    assert reduction_check.warning("sum", "sum") is None
