"""Evaluation pass: every test sample counts once, for any number of ranks and any form of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from manyhands.data.sources import source
from manyhands.errors import TaskError
from manyhands.metrics import evaluation_pass
from manyhands.metrics.evaluation_pass import EvaluatedModel
from manyhands.metrics.metric_set import MetricSet
from manyhands.replica.objective import Objective
from manyhands.task import accuracy

CPU = torch.device("cpu")
N = 37
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (N,), generator=torch.Generator().manual_seed(1))


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], Y[i]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(X[i], Y[i]) for i in range(N)])


FORMS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Dataset": Pairs,
    "DataLoader": lambda: DataLoader(Pairs(), batch_size=5),
    "DataLoader with two processes": lambda: DataLoader(Pairs(), batch_size=5, num_workers=2),
    "stream": Stream,
}


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


ENTROPY = Objective(nn.functional.cross_entropy)


def evaluate(
    data: Any,
    rank: int,
    size: int,
    batch: int = 4,
    objective: Objective = ENTROPY,
    metrics: dict[str, Any] | None = None,
    net: nn.Module | None = None,
    **options: Any,
) -> Tensor:
    known = {"accuracy": accuracy} if metrics is None else metrics
    return evaluation_pass.evaluate(
        EvaluatedModel(net or model(), objective, **options),
        evaluation_pass.evaluation_batches(source(data, CPU, "Task.test"), rank, size, batch),
        MetricSet(known, CPU),
        CPU,
    )


def expected() -> Tensor:
    net = model().eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(X), Y, reduction="sum")
    return torch.tensor([loss, (net(X).argmax(1) == Y).sum(), N, N], dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS)
def test_sums_over_any_number_of_ranks_are_those_of_one(form: str) -> None:
    sizes = (1, 3) if "processes" in form else (1, 2, 3, 5, 8, 40)  # 40: some ranks have no sample
    for size in sizes:
        total = sum(evaluate(FORMS[form](), rank, size) for rank in range(size))
        torch.testing.assert_close(total, expected(), rtol=1e-6, atol=1e-6)
        assert total[-1] == N


def test_dict_batches_and_token_counts_of_a_step_are_counted_as_the_step_says() -> None:
    def step(net: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        assert not net.training
        return nn.functional.cross_entropy(net(batch["x"]), batch["y"]), 10 * len(batch["y"])

    total = sum(
        evaluate({"x": X, "y": Y}, r, 3, objective=Objective(step=step), metrics={})
        for r in range(3)
    )
    assert float(total[-1]) == 10 * N
    torch.testing.assert_close(total[0] / total[-1], expected()[0] / N, rtol=1e-6, atol=0)


def test_the_model_is_in_evaluation_mode_during_it_and_as_it_was_after_also_when_it_fails() -> None:
    net = model()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    evaluate((X, Y), 0, 1, metrics={}, net=net)
    assert net.training and all(torch.equal(before[k], v) for k, v in net.state_dict().items()), (
        "no running statistics moved"
    )

    def bad(outputs: Tensor, target: Tensor) -> Tensor:
        raise ValueError("a metric of the user's")

    with pytest.raises(ValueError, match="a metric of the user's"):
        evaluate((X, Y), 0, 1, objective=Objective(bad), metrics={}, net=net)
    assert net.training


def test_several_inputs_go_to_the_model_in_order() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a - b

    apart = Objective(lambda out, y: (out + y).abs().mean())
    sums = evaluate((X, 2 * X, X), 0, 1, 5, apart, metrics={}, net=Two())
    assert sums.tolist() == [0.0, N, N]


@pytest.mark.parametrize(
    ("data", "says"), [({"x": X}, r"a dict of \['x'\]"), ((X,), "a tuple of 1")]
)
def test_batches_that_a_loss_cannot_take_are_named(data: Any, says: str) -> None:
    with pytest.raises(
        TaskError,
        match=rf"loss=\(outputs, target\) needs batches \(inputs..., target\), got {says}; give "
        r"step=",
    ):
        evaluate(data, 0, 1)


def test_slices_of_outputs_are_put_together_for_metrics_alone() -> None:
    class Slice:
        def gathered(self) -> Tensor:
            return X

    assert evaluation_pass.whole((Slice(), {"a": Y})) == (X, {"a": Y})
