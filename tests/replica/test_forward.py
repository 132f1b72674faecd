"""Evaluation counts every test sample once, for any number of ranks and any form of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import manyhands as mh
from manyhands.data.sources import source
from manyhands.errors import TaskError
from manyhands.replica import forward
from manyhands.replica.objective import Objective
from manyhands.task import accuracy
from support.small_task import small_data, small_task

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


def evaluate(data: Any, rank: int, size: int, batch: int = 4, **options: Any) -> Tensor:
    known = {
        "objective": Objective(nn.functional.cross_entropy),
        "metrics": {"accuracy": accuracy},
        "precision": "fp32",
    }
    return forward.evaluate(
        model(),
        source(data, CPU, "Task.test"),
        rank,
        size,
        batch,
        device=CPU,
        **{**known, **options},
    )


def expected() -> Tensor:
    net = model().eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(X), Y, reduction="sum")
    return torch.tensor([loss, (net(X).argmax(1) == Y).sum(), N], dtype=torch.float64)


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
    common = dict(rank=0, size=1, batch=4, metrics={}, precision="fp32", device=CPU)
    data, entropy = source((X, Y), CPU, "t"), Objective(nn.functional.cross_entropy)
    forward.evaluate(net, data, objective=entropy, **common)
    assert net.training and all(torch.equal(before[k], v) for k, v in net.state_dict().items()), (
        "no running statistics moved"
    )

    def bad(outputs: Tensor, target: Tensor) -> Tensor:
        raise ValueError("a metric of the user's")

    with pytest.raises(ValueError, match="a metric of the user's"):
        forward.evaluate(net, data, objective=Objective(bad), **common)
    assert net.training


def test_several_inputs_go_to_the_model_in_order() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a - b

    sums = forward.evaluate(
        Two(),
        source((X, 2 * X, X), CPU, "t"),
        0,
        1,
        5,
        Objective(lambda out, y: (out + y).abs().mean()),
        {},
        "fp32",
        CPU,
    )
    assert sums.tolist() == [0.0, N]


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


def test_accuracy_counts_classes_tokens_and_pixels() -> None:
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert accuracy(outputs, torch.tensor([0, 1, 0, 0])) == 0.75
    tokens = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    assert accuracy(tokens, tokens.argmax(-1)) == 1.0
    assert accuracy(tokens.transpose(1, 2), tokens.argmax(-1)) == 1.0, (
        "(N, classes, length), as cross_entropy takes it"
    )


def test_the_training_loss_of_no_samples_is_nothing_and_not_nan() -> None:
    """0/0 of an empty batch, which a rank without samples runs for its BatchNorm, must not look
    like divergence.
    """
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    loss = forward.TaskLoss(net, None, Objective(nn.functional.cross_entropy), "fp32", CPU)
    value, count = loss.forward((X[:0], Y[:0]), 0)
    assert count == 0 and float(value) == 0.0
    (value * 0.0).backward()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters()), (
        "backward ran all the way, and gave nothing"
    )


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    unreduced = Objective(lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"))
    loss = forward.TaskLoss(model(), None, unreduced, "fp32", CPU)
    with pytest.raises(
        TaskError,
        match=r"the loss has shape \(37,\), but one number for the batch is needed; use "
        r"reduction='mean'",
    ):
        loss.forward((X, Y), N)


def test_parts_in_eval_mode_stay_so_after_an_evaluation(tmp_path: Path) -> None:
    kept: list[bool] = []

    class Watch(mh.Callback):
        def on_round(self, run: Any, round: int, loss: Tensor) -> None:
            kept.append(net[1].training)

    net = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5).eval(), nn.Linear(4, 3))
    mh.train(
        lambda: small_task(net, test=small_data(30)),
        "epochs=2",
        directory=tmp_path / "run",
        quiet=True,
        callbacks=(Watch(),),
    )
    assert kept and not any(kept)
