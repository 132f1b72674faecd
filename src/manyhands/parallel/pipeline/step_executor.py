"""Step executor: one training step of a model that is cut over the ranks of a group.

    batches -> micro-batches -> _run: forward, backward of each -> tied weights -> sum of the loss

`PipelineExecutor` and `GraphExecutor` differ in `_run`: a pipeline runs stages by a schedule, a
graph runs segments in the order that its partition gives. What they share is here: the loss,
recomputation, tied weights and the events of a step.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from manyhands.core import Emit, Event, Group
from manyhands.data.batches import Batch, BatchIterator
from manyhands.errors import TaskError
from manyhands.parallel.pipeline.message_format import Values
from manyhands.parallel.pipeline.tied_weights import TiedWeights
from manyhands.parallel.pipeline.transfers import BatchKey, Transfers
from manyhands.replica.forward import TaskLoss
from manyhands.replica.objective import Objective
from manyhands.replica.recompute import buffers_stay

# (mean loss, samples of it) -> the scalar from which backward begins
Scaled = Callable[[Tensor, int], Tensor]
# (inputs of the batch, values from other ranks) -> values
Compute = Callable[[tuple[Any, ...], Values], Values]
TRAINED, INFERRED = "trained", "inferred"
MOST_PLANS = 64  # of steps with different numbers of micro-batches


@dataclass
class StepState:
    """The current step: its micro-batches, and the sums that the rank with the loss adds up."""

    batches: list[Batch]
    scaled: Scaled
    total: Tensor
    count: int = 0
    output: Any = None


class StepExecutor(ABC):
    """`held`: the modules of this rank with their tied parameters (`TiedWeights`). The
    rank with the model's output computes the objective. Called once a step by every rank of
    `group`, each with its own batch iterator over the same batches, so that inputs and targets are
    never sent. `infer` runs forward only."""

    def __init__(
        self,
        held: Sequence[tuple[nn.Module, Mapping[str, Sequence[int]]]],
        group: Group,
        transfers: Transfers,
        *,
        objective: Objective | None = None,
        warn: Callable[[str], None] | None = None,
        precision: str = "fp32",
        device: torch.device | None = None,
        recompute: bool = False,
        emit: Emit | None = None,
        clock: Callable[[], float] = time.time,
        rank: int | None = None,
    ):
        self.group, self.transfers = group, transfers
        self.objective, self._warn = objective or Objective(), warn
        self.precision, self.recompute = precision, recompute
        self.device = device or torch.device("cpu")
        self.round = 0  # of the events; the loop sets it
        self.counts = True  # whether the current micro-batch has samples of its own, for BatchNorm
        self.modules, self._tied = [module for module, _ in held], TiedWeights(held, group)
        self._emit, self._clock, self._rank = emit, clock, group.rank if rank is None else rank
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        where = self.device if self.device.type != "mps" else torch.device("cpu")
        self._zero = torch.zeros((), dtype=torch.float64, device=where)

    def __call__(self, scaled: Scaled, batches: BatchIterator) -> tuple[Tensor, int]:
        """One step: leaves its gradients in `.grad` of this rank's parameters, which must be None
        before. Returns the sum of losses over all samples of the step, and their number, on every
        rank."""
        micros = [batches.next()]
        while not micros[-1].last:
            micros.append(batches.next())
        state = self._run(micros, scaled, TRAINED)
        self._tied.sum()
        both = {"sums": torch.stack([state.total, self._zero + state.count])}
        self.group.all_reduce(both).wait()  # only the rank with the loss brought something
        total, count = both["sums"]
        # a step of the user's counts in its own way; else all ranks have read the same batches, and
        # the count need not be read from the device
        known = (
            sum(b.count for b in micros if b.values is not None)
            if self.objective.step is None
            else int(count)
        )
        return total.to(self._dtype), known

    @torch.no_grad()
    def infer(self, values: Any) -> Any:
        """The model's output for a batch, on the rank that computes it; None elsewhere. Every rank
        of the group calls it."""
        return self._run([Batch(values, 1, True)], lambda loss, count: loss, INFERRED).output

    @abstractmethod
    def _run(self, micros: list[Batch], scaled: Scaled, mode: str) -> StepState:
        """Forward, and if `mode` is TRAINED backward, of all micro-batches."""

    # -- what a stage or a segment does --

    def _compute(
        self, module: nn.Module, compute: Compute, inputs: tuple[Any, ...], values: Values
    ) -> Values:
        if not self.recompute or not torch.is_grad_enabled():
            return compute(inputs, values)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), buffers_stay(module)

        return cast(
            Values,
            checkpoint(
                _on_copies, compute, inputs, values, use_reentrant=False, context_fn=contexts
            ),
        )

    def _compute_loss(
        self, state: StepState, micro: int, module: nn.Module, model: Callable[..., Any]
    ) -> tuple[GradientEdge, Tensor] | None:
        """Add up the loss of a micro-batch. Returns where backward begins, with a gradient of 1;
        None: nothing requires one."""
        batch = state.batches[micro]
        whole = cast(nn.Module, _ModelProxy(module, model))
        no_batches = cast(BatchIterator, None)
        task = TaskLoss(whole, no_batches, self.objective, self.precision, self.device, self._warn)
        self._warn = None  # the first micro-batch tells
        loss, count = task.forward(batch.values, batch.count)
        root = state.scaled(loss, count)
        state.total += (loss.detach() * count).to(state.total)
        state.count += count
        if not root.requires_grad:
            return None
        return get_gradient_edge(root), torch.ones_like(root, requires_grad=False)

    @functools.cached_property
    def _dtype(self) -> torch.dtype:
        """Of the loss: double only where the model is."""
        doubled = any(w.dtype == torch.float64 for m in self.modules for w in m.parameters())
        return torch.float64 if doubled else torch.float32

    @contextmanager
    def _span(self, name: str, stage: int, micro: int) -> Iterator[None]:
        if self._emit is None:
            yield
            return
        start, before = self._clock(), self.transfers.nbytes
        yield
        seconds, nbytes = self._clock() - start, self.transfers.nbytes - before
        at: dict[str, float] = {"micro": micro, "stage": stage}
        self._emit(Event(start, self._rank, self.round, name, seconds, nbytes, at))


class _ModelProxy:
    """The whole model in a step of the user's, which may call it once: no rank holds all of the
    model."""

    def __init__(self, module: nn.Module, call: Callable[[tuple[Any, ...]], Any]):
        self._module, self._call, self._called = module, call, False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._called:
            raise TaskError(
                "step=(model, batch) calls the model several times, but a pipeline computes one "
                "call a batch; make one call of them, or put what the step does into a module"
            )
        self._called = True
        return self._call((*inputs, *named.values()))

    def __getattr__(self, name: str) -> Any:
        if name in ("training", "device", "dtype"):
            return getattr(self._module, name)
        raise TaskError(
            f"step=(model, batch) asks the model for {name!r}, but in a pipeline no rank has the "
            "whole model; put that into the model's forward, or use data=, tensor= or shard="
        )


def _on_copies(compute: Compute, inputs: tuple[Any, ...], values: Values) -> Values:
    # the part may change in place what it received: recomputation must find it as it was
    own = {
        k: v.clone() if isinstance(v, Tensor) and v.requires_grad else v for k, v in values.items()
    }
    return compute(inputs, own)


def batch_key(values: Any) -> BatchKey:
    """The shapes of a batch's tensors, which all ranks read for themselves."""
    if isinstance(values, Tensor):
        return tuple(values.shape)
    if isinstance(values, Mapping):
        return tuple((k, batch_key(v)) for k, v in values.items())
    return tuple(batch_key(v) for v in values) if isinstance(values, tuple | list) else ()
