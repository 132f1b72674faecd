"""Prediction over ranks: outputs and targets of all test samples, to rank 0, in the data's order.

    every rank    computes its part, and keeps it in a file of its own
    rank 0        receives batch after batch, and hands each on: it never holds more than one a rank

Ranks need no common disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import torch
from torch import Tensor

from manyhands.assembly.evaluation.evaluator import Evaluation
from manyhands.core import Group
from manyhands.data.sources import StreamSource
from manyhands.errors import TaskError
from manyhands.metrics.evaluation_pass import whole
from manyhands.metrics.state_exchange import WORD, pack, unpack

Columns = dict[str, Tensor]  # one row for each sample


def predict(evaluation: Evaluation, write: Callable[[Columns], None]) -> None:
    """Hand the predictions of all ranks to `write` on rank 0. Every rank calls it."""
    task, context = evaluation.task, evaluation.context
    if task is not None and task.loss is None and task.predict is None:
        raise TaskError(
            "the task has step=, which does not say what its outputs are; give it "
            'predict=lambda model, batch: (model(batch["x"]), batch["y"])'
        )
    group = context.group
    if group.size == 1:
        for columns in _batches(evaluation):
            write(columns)
        return
    where = context.device if context.device.type == "cuda" else torch.device("cpu")
    with tempfile.TemporaryFile() as file:
        kept = _KeptBatches(file)
        for columns in _batches(evaluation):
            kept.add(columns)
        lengths = _lengths(group, kept.lengths, where)
        for some in _order(lengths, isinstance(evaluation.test, StreamSource)):
            found = [_received(group, kept, rank, i, lengths, where) for rank, i in some]
            if group.rank == 0:
                write(_joined([columns for columns in found if columns is not None]))


def _batches(evaluation: Evaluation) -> Iterator[Columns]:
    """This rank's batches, where it has the model's output."""
    model, counts = evaluation.model(), evaluation.context.has_output
    with model.evaluating(evaluation.context.device):
        for values, samples in evaluation.batches():
            if (answers := model.answers(values)) is None:
                continue
            outputs, target = whole(model.outputs(answers, values))
            if counts:
                yield {
                    **_columns("outputs", outputs, samples),
                    **_columns("targets", target, samples),
                }


def _columns(name: str, value: Any, samples: int) -> Columns:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {k: v for key, one in value.items() for k, v in _columns(key, one, samples).items()}
    if not isinstance(value, Tensor) or not value.ndim or len(value) != samples:
        given = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            given = f"a tensor of shape {tuple(value.shape)}"
        raise TaskError(
            f"{name} of {samples} samples are {given}, but a tensor with one row for each sample, "
            "or a dict of them, is needed; Task(predict=...) can return one"
        )
    short = value.dtype in (torch.bfloat16, torch.float16)  # which few files know
    return {name: (value.float() if short else value).detach().cpu()}


class _KeptBatches:
    """Batches in a file, in order, each as a vector of numbers."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._starts = [0]

    @property
    def lengths(self) -> list[int]:
        return [(b - a) // WORD for a, b in zip(self._starts, self._starts[1:], strict=False)]

    def add(self, columns: Columns) -> None:
        names = torch.tensor(list("\n".join(columns).encode()), dtype=torch.uint8)
        vector = pack([[names], *([value] for value in columns.values())])
        self._file.write(vector.numpy().tobytes())
        self._starts.append(self._starts[-1] + vector.nbytes)

    def read(self, i: int) -> Tensor:
        self._file.seek(self._starts[i])
        raw = bytearray(self._file.read(self._starts[i + 1] - self._starts[i]))
        return torch.frombuffer(raw, dtype=torch.int64)


def _lengths(group: Group, mine: list[int], where: torch.device) -> list[list[int]]:
    """The words of every batch of every rank."""
    most = torch.tensor([len(mine)], dtype=torch.int64, device=where)
    group.all_reduce({"most": most}, op="max").wait()
    table = torch.zeros(group.size, int(most), dtype=torch.int64)
    table[group.rank, : len(mine)] = torch.tensor(mine, dtype=torch.int64)
    table = table.to(where)
    group.all_reduce({"lengths": table.view(-1)}).wait()
    return [[n for n in row if n] for row in table.tolist()]


def _order(lengths: list[list[int]], streamed: bool) -> Iterator[list[tuple[int, int]]]:
    """Batches (rank, number) in the data's order; of a stream, in which ranks take samples in turn,
    those whose rows are to be put in turn again."""
    if not streamed:
        yield from ([(rank, i)] for rank, row in enumerate(lengths) for i in range(len(row)))
        return
    for i in range(max(map(len, lengths))):
        yield [(rank, i) for rank, row in enumerate(lengths) if i < len(row)]


def _received(
    group: Group,
    kept: _KeptBatches,
    rank: int,
    i: int,
    lengths: list[list[int]],
    where: torch.device,
) -> Columns | None:
    """A batch of another rank, on rank 0."""
    vector = torch.zeros(0)
    if group.rank == rank:
        vector = kept.read(i)
        if rank:
            group.transfer({0: vector.to(where)}, {}).wait()
    elif group.rank == 0:
        received = torch.zeros(lengths[rank][i], dtype=torch.int64, device=where)
        group.transfer({}, {rank: received}).wait()
        vector = received.cpu()
    if group.rank:
        return None
    [names], *values = unpack(vector)
    return dict(zip(bytes(names.tolist()).decode().split("\n"), (v for [v] in values), strict=True))


def _joined(found: list[Columns]) -> Columns:
    """Row j of each part, for j = 0, 1, ..."""
    if len(found) == 1:
        return found[0]
    parts = [next(iter(columns.values())) for columns in found]
    order = torch.cat([torch.arange(len(part)) for part in parts]).sort(stable=True).indices
    return {name: torch.cat([columns[name] for columns in found])[order] for name in found[0]}
