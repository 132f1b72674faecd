"""Forward pass: from a batch to a mean loss (training) or to sums of metrics (evaluation)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.batches import BatchIterator
from manyhands.data.sources import DatasetSource, Source, StreamSource, TensorSource
from manyhands.errors import TaskError
from manyhands.replica.module import MicroLoss

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
        loss: Callable[..., Tensor] | None,
        step: Callable[[nn.Module, Any], Tensor | tuple[Tensor, int]] | None,
        precision: str,
        device: torch.device,
    ):
        self.module, self.batches, self.loss, self.step = module, batches, loss, step
        self.precision, self.device = precision, device

    def __call__(self) -> MicroLoss:
        batch = self.batches.next()
        if batch.values is None:
            return MicroLoss(None, 0, batch.last)
        loss, count = self.forward(batch.values, batch.count)
        return MicroLoss(loss, count, batch.last)

    def forward(self, values: Any, count: int) -> tuple[Tensor, int]:
        with autocast(self.precision, self.device):
            if self.step is not None:
                got = self.step(self.module, values)
                loss, own = got if isinstance(got, tuple) else (got, count)
                # a borrowed sample counts nothing, whatever the task counts
                count = own if count else 0
            else:
                assert self.loss is not None
                *inputs, target = _pair(values)
                loss = self.loss(self.module(*inputs), target)
        if loss.ndim:
            raise TaskError(
                f"the loss has shape {tuple(loss.shape)}, but a scalar mean over the batch is "
                "needed; use reduction='mean'"
            )
        if not count:
            # 0/0: no samples (the pass is for the BatchNorm inside), or no token that counts
            loss = loss.nan_to_num()
        return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss, int(count)


def evaluate(
    module: nn.Module,
    data: Source,
    rank: int,
    size: int,
    batch: int,
    loss: Callable[..., Tensor] | None,
    step: Callable[[nn.Module, Any], Tensor | tuple[Tensor, int]] | None,
    metrics: Mapping[str, Callable[[Any, Any], Tensor]],
    precision: str,
    device: torch.device,
    predict: Callable[[Any], Any] | None = None,
) -> Tensor:
    """Sums over this rank's test samples: [loss, metrics..., count], in float64.

    Every sample is counted once. `predict` gives the model's output for a batch where the model is
    split over ranks; None on ranks that do not have it.
    """
    sums = torch.zeros(
        2 + len(metrics), dtype=torch.float64, device=device if device.type != "mps" else "cpu"
    )
    # of each module: the user may have put a part in eval mode on purpose
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), autocast(precision, device):
            for values, n in _test_batches(data, rank, size, batch):
                answers = module
                if predict is not None:
                    if (output := predict(values)) is None:
                        continue
                    answers = _Answer(output)
                if step is not None:
                    got = step(answers, values)
                    mean, n = got if isinstance(got, tuple) else (got, n)
                    row = [mean.double()]
                else:
                    assert loss is not None
                    *inputs, target = _pair(values)
                    outputs = answers(*inputs)
                    row = [
                        loss(outputs, target).double(),
                        *(m(outputs, target).double().mean() for m in metrics.values()),
                    ]
                sums[:-1] += torch.stack(row) * n
                sums[-1] += n
    finally:
        for part, training in modes.items():
            part.training = training
    return sums


def _test_batches(data: Source, rank: int, size: int, batch: int) -> Iterator[tuple[Any, int]]:
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
    start, stop = data.samples * rank // size, data.samples * (rank + 1) // size
    where = data.device if isinstance(data, TensorSource) else torch.device("cpu")
    if isinstance(data, DatasetSource) and data.loaders:
        cuts = [list(range(i, min(i + batch, stop))) for i in range(start, stop, batch)]
        for cut, values in zip(cuts, data.prefetch(iter(cuts)), strict=True):
            yield values, len(cut)
        return
    for i in range(start, stop, batch):
        indices = torch.arange(i, min(i + batch, stop), device=where)
        yield data.fetch(indices), len(indices)


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
        return _pair(values)[:-1], ()
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


def _pair(values: Any) -> tuple[Any, ...]:
    if isinstance(values, tuple) and len(values) >= 2:
        return values
    raise TaskError(
        f"loss=(outputs, target) needs batches (inputs..., target), got {_shape(values)}; "
        "give step=(model, batch) instead"
    )


def _shape(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"a dict of {list(values)}"
    return (
        f"a tuple of {len(values)}" if isinstance(values, tuple) else f"a {type(values).__name__}"
    )
