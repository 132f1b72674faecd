"""Memory timeline: when each storage of one training step is made and freed, and by which stage.

    storage     made at t, freed at t', by a layer of stage s; a rank of a tensor group holds a
                share of it
    forward     keeps what backward needs: `retained`
    peak        the most alive at once, over forward and backward

The step is a dry run on torch's FakeTensor, which keeps shapes, devices, dtypes and the choice of
kernels without memory; autocast works, too. Between a layer cut by its outputs and the next one cut
by its inputs a rank of a tensor group holds a share. Backward is in the stage, and in the share,
whose saved tensors it frees. A step that cannot run on FakeTensors runs on a real micro-batch, and
a note says so.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Cuts = Mapping[str, tuple[int, int]]  # parameter -> (dim, groups) of its share on a tensor rank
# the parameters of each stage; a tied one is in every stage that uses it
Stages = Sequence[frozenset[str]]
LossOf = Callable[[nn.Module, Any], Tensor]  # (module, one micro-batch) -> loss


@dataclass
class StorageLifetime:
    """Lifetime of one storage."""

    nbytes: float  # a tensor rank's share of it
    made: int
    stage: int
    share: float
    freed: int | None = None
    received: bool = False  # from the stage before
    saved: bool = False  # by an operation of this stage, for backward
    gradient_of: str | None = None


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage for one micro-batch, in bytes."""

    retained: float
    received: float  # the part of it that came from the stages before
    activations: float  # at its peak
    gradients: float
    inputs: float = 0.0  # from the stage before
    outputs: float = 0.0  # to the stage after


@dataclass
class MemoryTimeline:
    """Memory timeline: the lifetimes of all storages of one step."""

    spans: list[StorageLifetime]
    turn: int  # the end of forward
    parameters: Mapping[str, nn.Parameter]
    notes: tuple[str, ...] = ()
    batch: int = 0  # bytes of the inputs of one micro-batch

    def _crossing(self, stage: int) -> float:
        """Bytes that `stage` receives."""
        return sum(span.nbytes for span in self.spans if span.received and span.stage == stage)

    def stage_memory(
        self, stage: int, passing: bool, share: Callable[[str, Tensor], float]
    ) -> StageMemory:
        """The memory of one stage.

        `passing`: each gradient is added to or moved into existing memory and freed at once.
        """
        moments: list[tuple[int, float, float]] = []
        retained = received = 0.0
        for span in (s for s in self.spans if s.stage == stage):
            if span.gradient_of is not None:
                nbytes = (
                    span.nbytes
                    / span.share
                    * share(span.gradient_of, self.parameters[span.gradient_of])
                )
                moments.append((span.made, 0.0, nbytes))
                if passing:
                    moments.append((span.made + 1, 0.0, -nbytes))
                continue
            moments.append((span.made, span.nbytes, 0.0))
            if span.freed is not None:
                moments.append((span.freed, -span.nbytes, 0.0))
            if span.made <= self.turn and (span.freed is None or span.freed > self.turn):
                retained += span.nbytes
                received += span.nbytes * span.received
        alive, grads, best = 0.0, 0.0, (0.0, 0.0)
        for _, more, more_grads in sorted(moments, key=lambda m: (m[0], m[1] + m[2] > 0)):
            alive, grads = alive + more, grads + more_grads
            best = max(best, (alive, grads), key=sum)
        inputs, outputs = self._crossing(stage), self._crossing(stage + 1)
        return StageMemory(retained, received, *best, inputs, outputs)


def record_timeline(
    module: nn.Module,
    loss_of: LossOf,
    values: Any,
    live: Callable[..., Any],
    stages: Stages,
    cuts: Cuts,
    tensor: int = 1,
    recompute: bool = False,
) -> MemoryTimeline:
    """Run one micro-batch forward and backward on a copy of the module; a dry run if possible."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        copied, batch = _copy(module, fake.from_tensor), _map(values, fake.from_tensor)
        return _run(copied, loss_of, batch, live, stages, cuts, tensor, recompute, fake)
    except Exception as error:
        said = str(error).strip()
        why = f"{type(error).__name__}: {said.splitlines()[0][:120] if said else ''}".rstrip(": ")
    try:
        with torch.random.fork_rng():
            real, batch = _copy(module, torch.clone), _map(values, torch.clone)
            found = _run(real, loss_of, batch, live, stages, cuts, tensor, recompute, nullcontext())
        return dataclasses.replace(
            found, notes=(f"activations measured on one real micro-batch ({why})",)
        )
    except Exception:
        return MemoryTimeline(
            [],
            0,
            dict(module.named_parameters()),
            (f"without activations: the step cannot be tried ({why})",),
        )


class _Tape:
    """Records every storage with the stage and the share in which it was made."""

    def __init__(self) -> None:
        self.spans: list[StorageLifetime] = []
        self.open: dict[int, list[StorageLifetime]] = {}
        self.clock, self.stage, self.share, self.backward = 0, 0, 1.0, False

    def record(self, key: int, nbytes: int) -> None:
        self.clock += 1
        if nbytes > 0:
            self.open[key] = [
                StorageLifetime(nbytes * self.share, self.clock, self.stage, self.share)
            ]
            self.spans += self.open[key]
            return
        for span in (gone := self.open.pop(key, [])):
            span.freed = self.clock
        if self.backward and gone:  # backward is in the stage whose saved tensors it frees
            self.stage, self.share = gone[-1].stage, gone[-1].share

    def reads(self, key: int) -> None:
        found = self.open.get(key)
        if not found or self.backward or any(span.stage >= self.stage for span in found):
            return
        before, here = (
            found[-1],
            dataclasses.replace(
                found[0], made=self.clock, stage=self.stage, received=True, saved=False
            ),
        )
        if not before.saved:  # a stage frees an output that it does not need itself
            before.freed = self.clock
            found.remove(before)
        found.append(here)
        self.spans.append(here)

    def save(self, tensor: Tensor) -> Tensor:
        for span in self.open.get(tensor.untyped_storage()._cdata, []):
            span.saved = span.saved or span.stage == self.stage
        return tensor


def _run(
    module: nn.Module,
    loss_of: LossOf,
    values: Any,
    live: Callable[..., Any],
    stages: Stages,
    cuts: Cuts,
    tensor: int,
    recompute: bool,
    mode: AbstractContextManager[Any],
) -> MemoryTimeline:
    named = dict(module.named_parameters())
    tape = _Tape()
    _mark(module, tape, stages, cuts, tensor)
    if recompute:
        for block in blocks(module):
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
    counter = live(record=tape.record, reads=tape.reads)
    try:
        with (
            mode,
            counter,
            torch.autograd.graph.saved_tensors_hooks(tape.save, lambda tensor: tensor),
        ):
            inputs = _map(values, torch.clone)  # each step makes its batch
            loss = loss_of(module, inputs)
            turn, tape.backward = tape.clock, True
            tape.stage = len(stages) - 1
            loss.backward()
        for name, p in named.items():
            if p.grad is not None:
                for span in tape.open.get(p.grad.untyped_storage()._cdata, [])[:1]:
                    span.gradient_of = name
                    span.stage = max(
                        (s for s, names in enumerate(stages) if name in names), default=span.stage
                    )
        return MemoryTimeline(tape.spans, turn, named, batch=sum(_bytes(inputs)))
    finally:
        counter.stop()


def _mark(module: nn.Module, tape: _Tape, stages: Stages, cuts: Cuts, tensor: int) -> None:
    """Hooks of each layer: which stage begins with it, and whether its output is a share."""
    names = {id(p): n for n, p in module.named_parameters()}

    def enter(layer: nn.Module, owned: list[str], begins: bool, ends: bool) -> None:
        candidates = [s for s, held in enumerate(stages) if any(n in held for n in owned)]
        if candidates and not tape.backward:
            tape.stage = next((s for s in candidates if s >= tape.stage), candidates[-1])
        if begins:
            tape.share = 1 / tensor
        elif ends:
            tape.share = 1.0

    def leave() -> None:
        tape.share = 1.0

    for layer in module.modules():
        owned = [
            names[id(p)] for p in layer.parameters(recurse=isinstance(layer, nn.MultiheadAttention))
        ]
        if not owned:
            continue
        dims = {cuts[n][0] for n in owned if n in cuts}
        # cut inside, summed at the end
        whole_out = isinstance(layer, nn.Embedding | nn.MultiheadAttention)
        begins, ends = 0 in dims and not isinstance(layer, nn.Embedding), dims == {1}
        layer.register_forward_pre_hook(
            lambda layer, _, o=owned, b=begins, e=ends: enter(layer, o, b, e)
        )
        if whole_out and dims:
            layer.register_forward_hook(lambda *_: leave())


def blocks(module: nn.Module) -> list[nn.Module]:
    """Blocks as the forecast takes them: the outermost children of lists of layers."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return list(module)
    return [block for child in module.children() for block in blocks(child)]


def _copy(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    memo: dict[int, Any] = {
        id(p): nn.Parameter(make(p.detach()), p.requires_grad) for p in module.parameters()
    }
    memo |= {id(b): make(b.detach()) for b in module.buffers()}
    return copy.deepcopy(module, memo)


def _bytes(values: Any) -> list[int]:
    found: list[int] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor.nbytes)
        return tensor

    _map(values, add)
    return found


def _map(values: Any, make: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(values, Tensor):
        return make(values)
    if isinstance(values, Mapping):
        return {k: _map(v, make) for k, v in values.items()}
    if isinstance(values, tuple | list):
        mapped = [_map(v, make) for v in values]
        return type(values)(*mapped) if hasattr(values, "_fields") else type(values)(mapped)
    return values
