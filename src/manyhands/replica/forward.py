"""Forward pass: from a batch to a mean loss (training) or to sums of metrics (evaluation)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.batches import BatchIterator
from manyhands.data.sources import DatasetSource, Source, StreamSource, TensorSource
from manyhands.errors import TaskError
from manyhands.replica.checks import reduction_check
from manyhands.replica.checks.step_guard import UserCode
from manyhands.replica.module import MicroLoss
from manyhands.replica.objective import Objective, pair

PADDING_WITHIN = 1000  # batches in which padding is looked for
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in `precision`; parameters, gradients, reductions and losses stay fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


class TaskLoss:
    """`next_loss` of a task: take this rank's next micro-batch and run the model on it."""

    def __init__(
        self,
        module: nn.Module,
        batches: BatchIterator,
        objective: Objective,
        precision: str,
        device: torch.device,
        warn: Callable[[str], None] | None = None,
    ):
        self.module, self.batches, self.objective = module, batches, objective
        self.precision, self.device = precision, device
        self._warn = warn  # of a loss that looks like the other reduction; None: do not look
        self._seen, self._look_at = 0, 1  # batches, and which of them is looked at next

    def __call__(self) -> MicroLoss:
        batch = self.batches.next()
        if batch.values is None:
            return MicroLoss(None, 0, batch.last)
        loss, count = self.forward(batch.values, batch.count)
        return MicroLoss(loss, count, batch.last)

    def forward(self, values: Any, count: int) -> tuple[Tensor, int]:
        self._seen += count > 1
        with autocast(self.precision, self.device), UserCode():
            if self._warn is not None and count > 1 and self._looks(values):
                loss, count = self._checked(self._warn, values, count)
            else:
                loss, count = self.objective(self.module, values, count)
        if not count:
            # 0/0: no samples (the pass is for the BatchNorm inside), or no token that counts
            loss = loss.nan_to_num()
        return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss, count

    def _looks(self, values: Any) -> bool:
        """Whether to look at this batch: the 1st, 2nd, 4th, 8th, ..., and those with padding."""
        if self._seen >= self._look_at:
            self._look_at *= 2
            return True
        target = values[-1] if isinstance(values, tuple | list) and values else None
        if self._seen > PADDING_WITHIN or not isinstance(target, Tensor):
            return False
        return not target.is_floating_point() and target.numel() > 0 and bool(target.min() < 0)

    def _checked(self, warn: Callable[[str], None], values: Any, count: int) -> tuple[Tensor, int]:
        """The loss of a batch, and a warning if it looks like the other reduction. On a GPU only
        the first batch is looked at: looking waits for it."""
        plain, apparent = self.objective.loss, []
        self._warn = warn if self.device.type == "cpu" else None

        def judged(outputs: Any, target: Any) -> Tensor:
            assert plain is not None
            loss = plain(outputs, target)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                apparent.append(reduction_check.of_halves(plain, loss, outputs, target))
            return loss

        looking = self.objective if plain is None else replace(self.objective, loss=judged)
        loss, counted = looking(self.module, values, count)
        if plain is None:
            apparent.append(reduction_check.of_graph(loss, counted))
        text = reduction_check.warning(self.objective.reduction, apparent[0] if apparent else None)
        if text is None and counted < count:
            text = reduction_check.FEWER.format(counted=counted, count=count)
        if text is not None:
            self._warn = None  # once
            warn(text)
        return loss, counted


def evaluate(
    module: nn.Module,
    data: Source,
    rank: int,
    size: int,
    batch: int,
    objective: Objective,
    metrics: Mapping[str, Callable[[Any, Any], Tensor]],
    precision: str,
    device: torch.device,
    predict: Callable[[Any], Any] | None = None,
    order: Tensor | None = None,
    doubt: Callable[[list[str]], None] | None = None,
) -> Tensor:
    """Sums over this rank's test samples: [loss, metrics..., count], in float64.

    Every sample is counted once. `predict` gives the model's output for a batch where the model is
    split over ranks; None on ranks that do not have it. `order`: the samples that count, where a
    DataLoader's sampler chooses them. `doubt` is told of metrics that are no means over samples.
    """
    sums = torch.zeros(
        2 + len(metrics), dtype=torch.float64, device=device if device.type != "mps" else "cpu"
    )
    # of each module: the user may have put a part in eval mode on purpose
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), autocast(precision, device):
            for values, n in _test_batches(data, rank, size, batch, order):
                answers = module
                if predict is not None:
                    if (output := predict(values)) is None:
                        continue
                    answers = _Answer(output)
                if objective.step is not None:
                    mean, n = objective(answers, values, n)
                    row = [mean.double()]
                else:
                    *inputs, target = pair(values)
                    outputs = answers(*inputs)
                    if doubt is not None and (wrong := not_means(metrics, outputs, target)):
                        doubt(wrong)
                    doubt = None
                    row = [
                        objective.of_outputs(outputs, target, n).double(),
                        *(_metric(name, m(outputs, target)) for name, m in metrics.items()),
                    ]
                if n:  # a batch without a token that counts has a mean of 0/0
                    sums[:-1] += torch.stack(row) * n
                    sums[-1] += n
    finally:
        for part, training in modes.items():
            part.training = training
    return sums


def _metric(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.double().mean()
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError):
        raise TaskError(
            f"metric {name} returned a {type(value).__name__}, but a number is needed"
        ) from None


def not_means(
    metrics: Mapping[str, Callable[[Any, Any], Any]], outputs: Any, target: Any
) -> list[str]:
    """Metrics whose value for a batch is not the mean of those of its halves (F1, a count): over
    batches and ranks they add up to another number."""
    if not (isinstance(outputs, Tensor) and isinstance(target, Tensor)) or len(outputs) % 2:
        return []
    half, found = len(outputs) // 2, []
    for name, metric in metrics.items():
        try:
            whole, first, second = (
                float(_metric(name, metric(outputs[part], target[part])))
                for part in (slice(None), slice(half), slice(half, None))
            )
        except Exception:  # of half a batch it may not be defined: then it is no mean
            found.append(name)
            continue
        if abs(whole - (first + second) / 2) > 1e-4 * max(1.0, abs(whole)):
            found.append(name)
    return found


def _test_batches(
    data: Source, rank: int, size: int, batch: int, order: Tensor | None
) -> Iterator[tuple[Any, int]]:
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


def inputs_of(values: Any, step: Callable[[nn.Module, Any], Any] | None) -> tuple[Any, ...]:
    """The arguments of the model for a batch: positional ones first, then keyword arguments."""
    return _call_of(values, step)[0]


def names_of(values: Any, step: Callable[[nn.Module, Any], Any] | None) -> tuple[str, ...]:
    """The names of the keyword arguments among them."""
    return _call_of(values, step)[1]


def called(module: nn.Module, inputs: Sequence[Any], names: Sequence[str]) -> Any:
    """The output of `module` for the arguments of `inputs_of` and `names_of`."""
    first = len(inputs) - len(names)
    return module(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


def _call_of(
    values: Any, step: Callable[[nn.Module, Any], Any] | None
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    if step is None:
        return pair(values)[:-1], ()
    try:
        step(_Listener(), values)
    except _Called as call:
        return call.inputs, call.names
    raise TaskError(
        "step=(model, batch) did not call the model, so there is nothing to split; "
        "call it with the batch's tensors"
    )


class _Answer(nn.Module):
    """A model whose output is known."""

    def __init__(self, output: Any):
        super().__init__()
        self.__dict__["_output"] = output

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._output


class _Called(Exception):
    def __init__(self, inputs: tuple[Any, ...], names: tuple[str, ...]):
        self.inputs, self.names = inputs, names


class _Listener(nn.Module):
    """Takes the place of the model and raises the arguments of its call."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        raise _Called((*inputs, *named.values()), tuple(named))
