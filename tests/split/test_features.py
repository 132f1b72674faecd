"""Split by feature: which rank has which columns.

Ranks that have some of the columns each train what one process trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import Group, Position
from manyhands.data.batches import IndexedBatches
from manyhands.data.sources import DatasetSource, TensorSource
from manyhands.errors import PlanError, TaskError
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.solo import SoloGroup
from manyhands.merge.all_reduce import AllReduce
from manyhands.parallel import feature_linear
from manyhands.replica.flat import FlatParameters
from manyhands.replica.forward import TaskLoss
from manyhands.replica.module import ModuleReplica
from manyhands.replica.objective import Objective
from manyhands.replica.update import WholeUpdate
from manyhands.split.data import SPLITS, DataSplit
from manyhands.split.features import columns, shard_specs
from support.compare import assert_close

CPU = torch.device("cpu")
SAMPLES, COLUMNS, BATCH = 50, 13, 8
G = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, COLUMNS, generator=G, dtype=torch.float64)
Y = (X @ torch.randn(COLUMNS, 3, generator=G, dtype=torch.float64)).argmax(1)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(COLUMNS, 3).double()


def wider() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(COLUMNS, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)).double()


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], Y[i]


def sources(kind: str) -> Any:
    return TensorSource((X, Y), CPU) if kind == "tensors" else DatasetSource(Rows(), CPU)


def train(
    size: int, make: Callable[[], nn.Module] = linear, steps: int = 20, kind: str = "tensors"
) -> tuple[list[dict[str, Tensor]], list[ObservedGroup], list[Tensor]]:
    """What each rank holds in the end, its link, and the losses of rank 0."""

    def main(group: Group) -> tuple[dict[str, Tensor], ObservedGroup, Tensor]:
        model, source, link = make(), sources(kind), ObservedGroup(group, lambda event: None)
        if size > 1:
            shard = columns(source.features, group.rank, size)
            assert shard.cols is not None and shard.rows is None, "all samples, some columns"
            weight = feature_linear.first(model, source.features)
            share = shard_specs(model.named_parameters(), weight, group.rank, size)[weight]
            feature_linear.apply(
                model, weight, share, lambda scores: link.all_reduce({"scores": scores}).wait()
            )
            source.keep_features(shard.cols)
            assert source.fetch(torch.arange(4))[0].shape == (4, len(shard.cols))
        flat = FlatParameters(model, lambda n, dtype: torch.zeros(n, dtype=dtype), 2**20)
        walk = IndexedBatches(
            source,
            lambda epoch: SPLITS["shuffled"](SAMPLES, 0, epoch),
            DataSplit(SAMPLES, BATCH, BATCH, 0, 1),
            Position(),
        )
        update = WholeUpdate(
            flat,
            model,
            torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01),
        )
        task = TaskLoss(model, walk, Objective(nn.functional.cross_entropy), "fp32", CPU)
        replica, rule = ModuleReplica(flat, update, task, nominal=BATCH), AllReduce()
        losses = [rule.round(replica, SoloGroup(), {}) for _ in range(steps)]
        return (
            {k: v.detach().clone() for k, v in model.state_dict().items()},
            link,
            torch.stack(losses),
        )

    found = World(size).run(main)
    return [f[0] for f in found], [f[1] for f in found], [f[2] for f in found]


@pytest.mark.parametrize(("total", "size"), [(13, 1), (13, 3), (6, 6), (7, 4)])
def test_every_column_is_on_one_rank_and_shares_differ_by_one_at_the_most(
    total: int, size: int
) -> None:
    owned = [columns(total, i, size).cols for i in range(size)]
    assert torch.equal(torch.cat([c for c in owned if c is not None]), torch.arange(total))
    lengths = [len(c) for c in owned if c is not None]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("make", [linear, wider])
@pytest.mark.parametrize("kind", ["tensors", "dataset"])
def test_ranks_with_some_of_the_columns_each_train_what_one_process_trains(
    size: int, make: Callable[[], nn.Module], kind: str
) -> None:
    (whole,), _, (alone,) = train(1, make, kind=kind)
    models, _, losses = train(size, make, kind=kind)
    weight = feature_linear.first(make(), COLUMNS)
    for name, value in whole.items():
        if name == weight:
            assert_close(torch.cat([m[name] for m in models], 1), value, rtol=1e-10, atol=1e-12)
        else:
            assert all(torch.equal(m[name], models[0][name]) for m in models), (
                "what all hold stays the same bit for bit"
            )
            assert_close(models[0][name], value, rtol=1e-10, atol=1e-12)
    for each in losses:
        assert_close(each, alone, rtol=1e-10, atol=1e-12)
    assert float(alone[-1]) < float(alone[0]) / 2, "there was something to learn"


def test_what_a_rank_holds_lies_where_its_part_says() -> None:
    whole = linear()
    held = [shard_specs(whole.named_parameters(), "weight", i, 3) for i in range(3)]
    assembled = torch.zeros(3, COLUMNS, dtype=torch.float64)
    for part in held:
        assert part["bias"].dim is None
        part["weight"].insert(part["weight"].extract(whole.weight.data), assembled)
    assert torch.equal(assembled, whole.weight)


def test_only_scores_travel_however_many_columns_there_are() -> None:
    _, links, _ = train(3, steps=6)  # an epoch is six batches of 8 and one of 2
    for link in links:
        assert link.nbytes == 6 * BATCH * 3 * 8


# -- refusals --


def test_more_ranks_than_columns_are_refused() -> None:
    with pytest.raises(
        PlanError, match=r"tensor=4 ranks, but the data has 3 columns; set tensor=3 or fewer"
    ):
        columns(3, 0, 4)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Conv1d(1, 1, 1), "it has no nn.Linear"),
        (
            nn.Sequential(nn.Linear(7, 2)),
            r"needs a model that begins with nn.Linear\(13, ...\).*begins with 0: 7 columns",
        ),
    ],
)
def test_a_model_that_begins_otherwise_is_told_so(model: nn.Module, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        feature_linear.first(model, COLUMNS)


def test_a_model_that_does_something_with_its_input_first_is_caught_in_the_first_pass() -> None:
    model = nn.Sequential(nn.Softmax(1), nn.Linear(COLUMNS, 3).double())
    share = shard_specs(model.named_parameters(), "1.weight", 0, 2)["1.weight"]
    feature_linear.apply(model, feature_linear.first(model, COLUMNS), share, lambda scores: None)
    with pytest.raises(TaskError, match=r"changes its input before its first nn\.Linear"):
        model(X[:, :7])


def test_data_that_has_no_columns_is_refused() -> None:
    with pytest.raises(
        TaskError,
        match=r"needs inputs \(samples, columns\), but the first of each batch has shape \(50, 1, "
        r"13\)",
    ):
        _ = TensorSource((X[:, None], Y), CPU).features
