"""Evaluation pass: this rank's test samples through the model, to sums and accumulated metrics.

    sums = [loss * n, function * samples, ..., samples, n]

`n` is what the loss is a mean over: the samples, or what `step=` counts. Sums of all ranks add up,
and every sample counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from manyhands.data.sources import DatasetSource, Source, StreamSource, TensorSource
from manyhands.errors import TaskError
from manyhands.metrics.metric_set import MetricSet, mean_value
from manyhands.metrics.predicted_classes import wide
from manyhands.metrics.user_line import user_line
from manyhands.replica import forward
from manyhands.replica.objective import Objective, outputs_of, pair

Predict = Callable[[Any, Any], tuple[Any, Any]]  # (model, batch) -> (outputs, target)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with what says how a batch goes through it. `infer` gives its output for a batch
    where it is split over ranks; None on ranks that do not have it."""

    module: nn.Module
    objective: Objective
    predict: Predict | None = None
    precision: str = "fp32"
    infer: Callable[[Any], Any] | None = None

    @contextmanager
    def evaluating(self, device: torch.device) -> Iterator[None]:
        """In eval mode and without gradients."""
        # of each module: the user may have put a part in eval mode on purpose
        modes = {m: m.training for m in self.module.modules()}
        self.module.eval()
        try:
            with torch.no_grad(), forward.autocast(self.precision, device):
                yield
        finally:
            for part, training in modes.items():
                part.training = training

    def answers(self, values: Any) -> Any:
        """What takes the place of the model for this batch: the model, or one whose output is known
        already; None: this rank does not have it."""
        if self.infer is None:
            return self.module
        if self.predict is not None:
            self._check_call(values)
        output = self.infer(values)
        return None if output is None else _Answer(output)

    def outputs(self, answers: Any, values: Any) -> tuple[Any, Any]:
        """Outputs and target of a batch, as metrics compare them."""
        if self.predict is None:
            *inputs, target = pair(values)
            return outputs_of(answers, inputs), target
        try:
            found = self.predict(answers, values)
        except TaskError:
            raise
        except Exception as e:
            raise TaskError(
                f"predict=(model, batch) failed: {type(e).__name__}: {e}{user_line(e)}"
            ) from e
        if not isinstance(found, tuple | list) or len(found) != 2:
            given = f"{len(found)} values" if isinstance(found, tuple | list) else type(found)
            raise TaskError(
                f"predict=(model, batch) returned {given}, but (outputs, target) is needed"
            )
        return found[0], found[1]

    def _check_call(self, values: Any) -> None:
        """A pipeline computes the model once for `loss` or `step` and for `predict`, so both must
        call it alike."""
        trained = forward.inputs_of(values, self.objective.step)
        asked = forward.inputs_of(values, self.predict)
        alike = len(trained) == len(asked) and all(
            a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
            for a, b in zip(trained, asked, strict=True)
        )
        if not alike:
            raise TaskError(
                "predict=(model, batch) calls the model with other inputs than the training does, "
                "but a pipeline computes both at once; give it the same inputs"
            )


def evaluate(
    model: EvaluatedModel,
    batches: Iterator[tuple[Any, int]],
    metrics: MetricSet,
    device: torch.device,
    *,
    counts: bool = True,
    doubt: Callable[[list[str]], None] | None = None,
) -> Tensor:
    """The sums of these batches, given with their numbers of samples. Objects of `metrics` see them
    where this rank `counts`. `doubt` is told of functions that are no means over samples."""
    sums = torch.zeros(
        3 + len(metrics.functions),
        dtype=torch.float64,
        device=device if device.type != "mps" else "cpu",
    )
    objective = model.objective
    with model.evaluating(device):
        for values, samples in batches:
            if (answers := model.answers(values)) is None:
                continue
            n = samples
            found: tuple[Any, Any] | None = None
            if objective.step is None and model.predict is None:
                found = model.outputs(answers, values)
                loss = objective.of_outputs(*found, samples)
            else:
                loss, n = objective(answers, values, samples)
            if metrics.names and found is None:
                found = model.outputs(answers, values)
            means: list[Tensor] = []
            if found is not None and metrics.names:
                outputs, target = whole(found)
                if doubt is not None and (wrong := not_means(metrics.functions, outputs, target)):
                    doubt(wrong)
                doubt = None
                means = metrics.means(outputs, target)
                if counts:
                    metrics.update(outputs, target, samples)
            if n:  # a batch without a token that counts has a mean of 0/0
                sums[0] += wide(loss).to(sums.device) * n
            for i, mean in enumerate(means, 1):
                sums[i] += mean.to(sums.device) * samples
            sums[-2] += samples
            sums[-1] += n
    return sums


def whole(values: Any) -> Any:
    """Outputs of which ranks hold slices (tensor=), as whole tensors. All of these ranks call
    it."""
    return tree_map(lambda v: v.gathered() if hasattr(v, "gathered") else v, values)


def read_sums(sums: Tensor, metrics: MetricSet) -> dict[str, float]:
    """The loss and the functions' values, of the sums of all ranks."""
    loss, *functions, samples, n = sums.tolist()
    if not n:
        raise TaskError("Task.test gave no sample; give at least one, or leave test out")
    values = zip(metrics.functions, functions, strict=True)
    return {"loss": loss / n, **{name: value / samples for name, value in values}}


def not_means(metrics: Mapping[str, Callable[..., Any]], outputs: Any, target: Any) -> list[str]:
    """Functions whose value for a batch is not the mean of those of its halves (F1, a count): over
    batches and ranks they add up to another number."""
    if not (isinstance(outputs, Tensor) and isinstance(target, Tensor)) or len(outputs) % 2:
        return []
    half, found = len(outputs) // 2, []
    for name, metric in metrics.items():
        try:
            whole, first, second = (
                float(mean_value(name, metric(outputs[part], target[part])))
                for part in (slice(None), slice(half), slice(half, None))
            )
        except Exception:  # of half a batch it may not be defined: then it is no mean
            found.append(name)
            continue
        if abs(whole - (first + second) / 2) > 1e-4 * max(1.0, abs(whole)):
            found.append(name)
    return found


# -- batches of the test data --


def evaluation_batches(
    data: Source, rank: int, size: int, batch: int, order: Tensor | None = None
) -> Iterator[tuple[Any, int]]:
    """The part of rank `rank` of `size`, by batches, with their numbers of samples: consecutive
    samples of the data, or of `order`; of a stream every `size`-th."""
    if isinstance(data, StreamSource):
        rows: list[Any] = []
        for i, row in enumerate(data.items(0)):
            if i % size == rank:
                rows.append(row)
            if len(rows) == batch:
                yield data.to_device(rows), len(rows)
                rows = []
        if rows:
            yield data.to_device(rows), len(rows)
        return
    order = torch.arange(data.samples) if order is None else order
    mine = order[len(order) * rank // size : len(order) * (rank + 1) // size]
    cuts = mine.split(batch) if len(mine) else ()
    if isinstance(data, DatasetSource) and data.loaders:
        wanted = [cut.tolist() for cut in cuts]
        for cut, values in zip(cuts, data.prefetch(iter(wanted)), strict=True):
            yield values, len(cut)
        return
    where = data.device if isinstance(data, TensorSource) else torch.device("cpu")
    for cut in cuts:
        yield data.fetch(cut.to(where)), len(cut)


class _Answer(nn.Module):
    """A model whose output is known."""

    def __init__(self, output: Any):
        super().__init__()
        self.__dict__["_output"] = output

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._output
