"""Batch iterators: every rank gets its part of every batch, whatever form the data has.

No sample is lost or repeated, from any position on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from manyhands.core import Position
from manyhands.data.batches import IndexedBatches, StreamedBatches
from manyhands.data.sources import DatasetSource, StreamSource, source
from manyhands.errors import TaskError
from manyhands.split.data import DataSplit, shuffled

CPU = torch.device("cpu")
N = 23
START = Position()


class Squares(Dataset[tuple[Tensor, int]]):
    def __init__(self, n: int = N):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([float(i)]), i * i


class Fetched(Squares):
    """As torch's own loader, which asks for a whole batch where a data set can give one."""

    def __getitems__(self, wanted: list[int]) -> list[tuple[Tensor, int]]:
        return [self[i] for i in wanted]


class Lines(IterableDataset[dict[str, int]]):
    def __init__(self, n: int = N, longer_by: int = 0):
        self.n, self.longer_by, self.epoch = n, longer_by, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"i": i, "epoch": self.epoch} for i in range(self.n + self.epoch * self.longer_by))


class Row(NamedTuple):
    x: Tensor
    i: int


X = torch.arange(float(N)).unsqueeze(1)
Y = torch.arange(N) ** 2
FORMS: dict[str, Callable[[], Any]] = {
    "tuple of tensors": lambda: (X, Y),
    "list of arrays": lambda: [X.numpy(), Y.numpy()],
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Dataset": Squares,
    "Dataset that fetches batches": Fetched,
    "DataLoader": lambda: DataLoader(Squares(), batch_size=4, shuffle=True),
    "DataLoader of tensors": lambda: DataLoader(TensorDataset(X, Y), batch_size=4),
    "list of samples": lambda: [Squares()[i] for i in range(N)],
}


def batches_of(
    data: Any,
    rank: int,
    size: int,
    at: Position = START,
    batch: int = 3,
    global_batch: int | None = None,
    **options: Any,
) -> IndexedBatches | StreamedBatches:
    found = source(data, CPU, "Task.train")
    total = global_batch or batch * size
    if isinstance(found, StreamSource):
        return StreamedBatches(
            found,
            lambda n: DataSplit(n, n, batch, rank, size).step_samples(Position()),
            total,
            at,
            **options,
        )
    return IndexedBatches(
        found,
        lambda epoch: shuffled(N, 0, epoch),
        DataSplit(N, total, batch, rank, size),
        at,
        **options,
    )


def read(
    batches: IndexedBatches | StreamedBatches, epochs: int = 1, steps: int | None = None
) -> list[Any]:
    """What a rank gets to the end of `epochs` or for `steps` optimizer steps."""
    got, done = [], 0
    while batches.position.epoch < epochs if steps is None else done < steps:
        batch = batches.next()
        done += batch.last
        if batch.count:
            assert len(batches_first(batch.values)) == batch.count
            got.append(batch.values)
    return got


def batches_first(values: Any) -> Tensor:
    return next(iter(values.values())) if isinstance(values, dict) else values[0]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_is_read_exactly_once_by_any_number_of_ranks(form: str) -> None:
    for size in (1, 2, 4):
        got = [
            values for rank in range(size) for values in read(batches_of(FORMS[form](), rank, size))
        ]
        x, y = torch.cat([v[0] for v in got]), torch.cat([v[1] for v in got])
        assert torch.equal(x.flatten().sort().values, X.flatten()), "once each"
        assert torch.equal((x.flatten() ** 2).long(), y), "inputs and targets belong together"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_batches(form: str) -> None:
    ours = read(batches_of(FORMS[form](), 1, 2), epochs=2)
    for (x, y), (x0, y0) in zip(ours, read(batches_of((X, Y), 1, 2), epochs=2), strict=True):
        assert torch.equal(x, x0) and torch.equal(y, y0) and x.dtype == x0.dtype


def test_dict_batches_keep_their_names() -> None:
    got = [v for rank in range(2) for v in read(batches_of({"x": X, "y": Y.numpy()}, rank, 2))]
    assert all(set(v) == {"x", "y"} for v in got)
    assert torch.cat([v["y"] for v in got]).sort().values.tolist() == Y.tolist()


def test_named_tuples_stay_named_tuples_and_a_collate_function_is_used() -> None:
    rows = [Row(torch.tensor([float(i)]), i) for i in range(N)]
    (values, *_) = read(batches_of(rows, 0, 1))
    assert isinstance(values, Row) and torch.equal(values.x.flatten().long(), values.i)
    loader = DataLoader(
        Squares(),
        batch_size=4,
        collate_fn=lambda rows: {"sum": torch.tensor([sum(r[1] for r in rows)])},
    )
    found = source(loader, CPU, "Task.train")
    assert isinstance(found, DatasetSource) and found.fetch(torch.tensor([1, 2]))["sum"].item() == 5


def test_batches_are_placed_and_cast_where_asked_and_integers_stay_integers() -> None:
    for data in ((X, Y), Squares(), Lines()):
        found = source(data, CPU, "Task.train")
        found.cast(torch.float64)
        values = (
            found.to_device([{"x": torch.ones(1), "y": 3}])
            if isinstance(found, StreamSource)
            else found.fetch(torch.arange(2))
        )
        x, y = values.values() if isinstance(values, dict) else values
        assert (x.dtype, y.dtype) == (torch.float64, torch.int64)
    assert source((np.zeros((3, 2)),), CPU, "t").fetch(torch.arange(1))[0].dtype == torch.float32, (
        "numpy's doubles are nobody's choice"
    )
    assert (
        source((torch.zeros(3, dtype=torch.float64),), CPU, "t").fetch(torch.arange(1))[0].dtype
        == torch.float64
    )


@pytest.mark.parametrize(
    "data",
    [Squares, lambda: (X, Y), lambda: Lines(), lambda: Lines(longer_by=5)],
    ids=["dataset", "tensors", "stream", "stream that grows"],
)
def test_resumed_batches_go_on_where_it_stopped_on_any_number_of_ranks(
    data: Callable[[], Any],
) -> None:
    def flat(got: list[Any]) -> list[int]:
        return [int(i) for v in got for i in (v["i"] if isinstance(v, dict) else v[0].flatten())]

    length = N if not isinstance(data(), Lines) else len(list(data()))
    for before, after, steps in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 3)):
        first = [batches_of(data(), r, before, batch=2, global_batch=6) for r in range(before)]
        seen = [i for w in first for i in flat(read(w, steps=steps))]
        (at,) = {w.position for w in first}
        rest = [batches_of(data(), r, after, at, batch=2, global_batch=6) for r in range(after)]
        seen += [i for w in rest for i in flat(read(w))]
        assert sorted(seen) == list(range(length)), (before, after, steps)
        assert {w.position for w in rest} == {Position(1, 0, -(-length // 6))}


def test_every_epoch_of_a_stream_is_told_its_number_and_may_have_its_own_length() -> None:
    for size in (1, 3):
        ranks = [batches_of(Lines(5, longer_by=4), r, size) for r in range(size)]
        got = [v for w in ranks for v in read(w, epochs=3)]
        pairs = sorted(
            (int(e), int(i)) for v in got for e, i in zip(v["epoch"], v["i"], strict=True)
        )
        assert pairs == [(e, i) for e in range(3) for i in range(5 + 4 * e)]


def test_all_ranks_of_a_stream_make_the_same_number_of_micro_batches() -> None:
    for n in range(1, 20):
        ends = []
        for rank in range(3):
            w, flags = batches_of(Lines(n), rank, 3, batch=2, global_batch=12), []
            while w.position.epoch == 0:
                flags.append(w.next().last)
            ends.append(flags)
        assert ends[0] == ends[1] == ends[2]


def test_a_stream_without_samples_says_so() -> None:
    with pytest.raises(TaskError, match="the training stream gave no sample in epoch 1"):
        batches_of(Lines(0), 0, 1).next()


@pytest.mark.parametrize(
    "data",
    [lambda: (X, Y), Squares, Fetched, lambda: {"x": X, "y": Y}, lambda: Lines()],
    ids=["tensors", "dataset", "fetched", "dict", "stream"],
)
def test_a_rank_without_samples_borrows_one_that_does_not_count_where_the_model_must_run(
    data: Callable[[], Any],
) -> None:
    """SyncBatchNorm inside the model exchanges: a rank with no samples left must run it too."""
    w = batches_of(
        data(), 3, 4, batch=2, global_batch=22, borrow=True
    )  # 23 samples: the last one goes to rank 0
    last = None
    while w.position.epoch == 0:
        last = w.next()
    assert last is not None and last.count == 0 and not w.counts
    full = batches_first(batches_of(data(), 0, 4).next().values)
    assert (
        batches_first(last.values).shape == (1, *full.shape[1:])
        and batches_first(last.values).dtype == full.dtype
    )


def test_without_such_a_model_nothing_is_fetched_for_no_samples() -> None:
    w = batches_of((X, Y), 3, 4, batch=2, global_batch=22)
    while w.position.epoch == 0:
        last = w.next()
    assert (last.values, last.count, last.last) == (None, 0, True)


# -- loader processes --


class Noisy(Squares):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.rand(1), i


def loading(data: Dataset[Any], rank: int = 0, size: int = 1, loaders: int = 2) -> IndexedBatches:
    found = DatasetSource(data, CPU, loaders=loaders)
    return IndexedBatches(
        found,
        lambda epoch: shuffled(N, 0, epoch),
        DataSplit(N, 4 * size, 4, rank, size),
        Position(),
    )


def test_loader_processes_give_the_same_batches_over_several_epochs() -> None:
    torch.manual_seed(0)
    ahead, here = loading(Squares(), 1, 2), batches_of(Squares(), 1, 2, batch=4)
    for (x, y), (x0, y0) in zip(read(ahead, epochs=2), read(here, epochs=2), strict=True):
        assert torch.equal(x, x0) and torch.equal(y, y0)
    ahead.close()


def test_loader_processes_leave_the_trainings_random_numbers_alone_and_draw_their_own() -> None:
    """Else a resumed run, which starts its loaders anew, would drop out other units than the run it
    goes on with.
    """
    noise = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        ahead = loading(Noisy())
        noise.append(ahead.next().values[0])
        assert torch.equal(before, torch.get_rng_state())
        ahead.close()
    assert not torch.equal(*noise), "ranks have different seeds and must see different noise"
