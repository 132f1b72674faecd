"""Data in a form that cannot be read, or that may mean two things, is refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from manyhands.data import sources
from manyhands.data.sources import DatasetSource, TensorSource, source
from manyhands.errors import TaskError

CPU = torch.device("cpu")
N = 23
X = torch.arange(float(N)).unsqueeze(1)
Y = torch.arange(N) ** 2


class Squares(Dataset[tuple[Tensor, int]]):
    def __init__(self, n: int = N):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return X[i], i * i


class Lines(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "Task.train is empty: there is nothing to train or test on; give at least one sample"),
        ((torch.zeros(0, 3), torch.zeros(0)), "Task.train is empty"),
        (Squares(0), "Task.train is empty"),
        (
            (torch.zeros(3), torch.zeros(4)),
            r"tensors of one data set must have equal lengths, got \{0: 3, 1: 4\}",
        ),
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, r"got \{'x': 3, 'y': 4\}"),
        ((torch.tensor(3.0), torch.zeros(4)), "a data column is a single number"),
        (
            7,
            "Task.train is a int; a tuple of tensors or arrays, a Dataset, an IterableDataset or "
            "a DataLoader is needed",
        ),
        (None, "Task.train is a NoneType"),
        (
            [DataLoader(Squares()), DataLoader(Squares())],
            "Task.train is a list with 2 data sets, but one is needed; join them by "
            "torch.utils.data.ConcatDataset, or evaluate the others after training, with mh.load",
        ),
        ([TensorDataset(X, Y), TensorDataset(X, Y)], "a list with 2 data sets"),
        ({"a": TensorDataset(X, Y), "b": Lines()}, "a dict with 2 data sets"),
        (
            [(X, Y), (X[:9], Y[:9])],
            r"is a list of 2 tuples of tensors with the same number of rows \(23, 9\), which may "
            "be samples, batches or whole data sets; give one Dataset of single samples: a "
            "TensorDataset of all rows, or a class with __getitem__",
        ),
        ([(X[i : i + 2], Y[i : i + 2].numpy()) for i in range(0, N, 2)], "a list of 12 tuples"),
        (list(DataLoader(TensorDataset(X, Y), batch_size=4)), r"a list of 6 lists .* \(4, 3\)"),
        ([{"x": X[:4], "y": Y[:4]}] * 3, "a list of 3 dicts"),
        ((np.zeros(3, dtype=np.uint64),), "a data column is of uint64, .*; give int64 or float32"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_what_is_needed(data: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        source(data, CPU, "Task.train")


@pytest.mark.parametrize(
    "sample",
    [(X[:1], Y[:1]), (X[:4], Y[:3]), (X[:4], 3), (X[:4], Y[2]), (X[:4],), {"x": X[:4], "y": 3}],
)
def test_a_list_that_can_only_be_samples_is_read_as_samples(sample: Any) -> None:
    found = source([sample] * 3, CPU, "Task.train")
    assert isinstance(found, DatasetSource) and found.samples == 3


def test_arrays_that_torch_cannot_take_as_they_are_are_converted() -> None:
    for dtype, wider in ((np.uint16, torch.int32), (np.uint32, torch.int64)):
        most = np.iinfo(dtype).max
        found = source((np.array([1, most], dtype=dtype),), CPU, "t").fetch(torch.tensor([1, 0]))
        assert found[0].dtype == wider and found[0].tolist() == [most, 1]
    turned = np.arange(6.0, dtype=np.float32).reshape(3, 2)[::-1, ::-1]
    assert source(turned, CPU, "t").fetch(torch.arange(3))[0].tolist() == turned.tolist()


def test_one_tensor_is_a_data_set_of_one_column() -> None:
    found = source(X, CPU, "Task.train")
    assert isinstance(found, TensorSource) and torch.equal(
        found.fetch(torch.tensor([2]))[0], X[2:3]
    )
    assert sources.move({"a": [X, "text"]}, CPU) == {"a": (X, "text")}
