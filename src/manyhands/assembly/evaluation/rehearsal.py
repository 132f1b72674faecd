"""Rehearsal of an evaluation: loss, predict and metrics on a few test samples before training.

A slip in them shows before the first epoch, not after it. Every rank does the same, on the same
samples. Nothing of the run changes: not random numbers, not statistics of BatchNorm, not the
metrics (copies of them are asked), not rows of `mh.Embedding` (zeros take their place).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.assembly.evaluation.evaluator import Evaluation
from manyhands.assembly.evaluation.goals import check_names
from manyhands.core import Table, Tensors
from manyhands.data.drawn import DrawnSource
from manyhands.data.sources import DatasetSource, Source, StreamSource, TensorSource
from manyhands.embedding.modules import Embedding
from manyhands.embedding.tables import embeddings
from manyhands.errors import ManyhandsError, TaskError
from manyhands.metrics import evaluation_pass
from manyhands.metrics.evaluation_pass import EvaluatedModel
from manyhands.metrics.metric_set import MetricSet
from manyhands.metrics.user_line import user_line
from manyhands.replica import state

MORE = 8  # batches, where one says too little


def rehearse(evaluation: Evaluation, module: nn.Module) -> None:
    """Evaluate `module`, which is not compiled, on a few samples; check what goals of the plan
    name against the values that come out."""
    context = evaluation.context
    if evaluation.task is None or evaluation.test is None:
        return
    before = state.rng_state(context.device)
    try:
        with _zero_rows(module):
            doubt = _ask(evaluation, module, 1)
            if doubt and not context.splits_model:  # to ask again would need the other ranks
                doubt = _ask(evaluation, module, MORE)
        if doubt:
            context.warn(doubt)
    finally:
        state.load_rng(before, context.device)


def _ask(evaluation: Evaluation, module: nn.Module, batches: int) -> str:
    """Why so many batches are too few for a metric, perhaps; "": they are not. Errors are raised
    where they would come on all samples too."""
    context, task = evaluation.context, evaluation.task
    assert task is not None and evaluation.test is not None
    few = _few(evaluation.test, context.micro_batch(evaluation.plan.batch or 1), batches)
    samples = sum(n for _, n in few)
    if not samples:
        return ""
    metrics, model = MetricSet(task.metrics, context.device), evaluation.model(module)
    counts, where = context.has_output, f"a batch of {samples} test samples, before training"
    try:
        sums = evaluation_pass.evaluate(model, iter(few), metrics, context.device, counts=counts)
    except TaskError as e:
        raise TaskError(f"{e} (on {where})") from e.__cause__
    except ManyhandsError:
        raise
    except Exception as e:
        raise TaskError(f"evaluating {where}, failed: {type(e).__name__}: {e}{user_line(e)}") from e
    if not counts or not float(sums[-2]):
        return ""
    try:
        found = metrics.compute(dict.fromkeys(metrics.functions, 0.0))
    except TaskError as e:
        if isinstance(e.__cause__, ValueError) and not _sure(evaluation, model, few):
            return f"{e} (on {where}: if it needs more samples, all is well)"
        raise TaskError(f"{e} (on {where})") from e.__cause__
    evaluation.known = ["loss", *found]
    check_names(evaluation.plan, evaluation.known)
    by = task.schedule_by
    if by not in ("step", "epoch", *evaluation.known):
        raise TaskError(
            f"schedule_by={by!r}: no such metric; the task has {', '.join(evaluation.known)}"
        )
    return ""


def _sure(evaluation: Evaluation, model: EvaluatedModel, few: list[tuple[Any, int]]) -> bool:
    """Whether what fails on these samples fails on all: they are all, or have every class. Some
    functions are not defined for a few samples (the area under a curve of one class)."""
    assert evaluation.test is not None
    if sum(n for _, n in few) == evaluation.test.samples:
        return True
    if evaluation.context.splits_model:
        return False
    with model.evaluating(evaluation.context.device):
        found = [model.outputs(model.answers(values), values) for values, _ in few]
    if not all(isinstance(value, Tensor) for pair in found for value in pair):
        return False
    outputs, target = found[0][0], torch.cat([target.reshape(-1) for _, target in found])
    if target.is_floating_point():
        return len(target) > 1
    classes = outputs.shape[1] if outputs.ndim == 2 else 2
    return len(target.unique()) >= max(2, classes)


def _few(data: Source, most: int, batches: int) -> list[tuple[Any, int]]:
    """Batches of a few samples from all over the data; none: there is no way to see some without
    effect."""
    if isinstance(data, StreamSource):
        if hasattr(data.dataset, "__next__"):  # what is read of an iterator is gone
            return []
        rows = list(itertools.islice(data.items(0), most * batches))
        parts = [rows[i : i + most] for i in range(0, len(rows), most)]
        return [(data.to_device(part), len(part)) for part in parts]
    samples = data.samples or 0
    wanted = torch.linspace(0, samples - 1, min(most * batches, samples)).round().long()
    try:
        return [(_fetched(data, part), len(part)) for part in wanted.split(most) if len(part)]
    except Exception:
        if data.sampling.own is not None:  # which may leave out samples that cannot be read
            return []
        raise


def _fetched(data: TensorSource | DatasetSource | DrawnSource, indices: Tensor) -> Any:
    if isinstance(data, DatasetSource) and data.loaders:
        # in a process of its own, as later: what samples open must not be open here
        batches = data.prefetch(iter([indices.tolist()]), loaders=1)
        try:
            return next(iter(batches))
        finally:
            batches.close()
    where = data.device if isinstance(data, TensorSource) else torch.device("cpu")
    return data.fetch(indices.to(where))


@contextmanager
def _zero_rows(module: nn.Module) -> Iterator[None]:
    """Zeros in place of the rows of embeddings: no store sees a request."""
    found = [(e, e.tables if e.attached else None) for e in embeddings(module)]
    for embedding, _ in found:
        embedding.attach(_ZeroRows())
    try:
        yield
    finally:
        for embedding, tables in found:
            embedding.attach(tables)


class _ZeroRows:
    """The rows of every table are zeros (a `RowSource`)."""

    of_run = False

    def lookup(self, module: Embedding, ids: Tensor) -> tuple[Tensor, Tensor, None]:
        distinct, inverse = module.wanted(ids).unique(return_inverse=True)
        dtype = getattr(torch, module.table.dtype)
        rows = torch.zeros(len(distinct), module.table.dim, dtype=dtype)
        return rows.to(ids.device), inverse, None

    def replace_rows(self, table: Table, content: Tensors) -> None: ...
    def replace_pieces(self, table: Table, contents: Any) -> None: ...
