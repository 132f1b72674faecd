"""One training step, tried on tensors without memory: which storages live from when to when, and whose they are.

    storage     made at t, gone at t', by a layer of stage s; a rank of a tensor group holds a share of it
    forward     leaves behind what backward needs: `retained`
    peak        the most alive at once, over forward and backward

torch's FakeTensor keeps shapes, devices, dtypes and the choice of kernels as they are with memory, so is autocast. Between a layer
cut by its outputs and the next one cut by its inputs a rank of a tensor group holds a share. Backward stands in that stage, and in
that share, whose leavings it lets go of. What cannot run without memory is run on a real micro-batch, and that is said.
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
Stages = Sequence[
    frozenset[str]
]  # the parameters of each stage; a tied one stands in every stage that uses it
LossOf = Callable[[nn.Module, Any], Tensor]  # (module, one micro-batch) -> loss


@dataclass
class StorageLifetime:
    """A storage, from when to when it lived."""

    nbytes: float  # a tensor rank's share of it
    made: int
    stage: int
    share: float
    freed: int | None = None
    received: bool = False  # from the stage before
    saved: bool = False  # by an operation of this stage, for its way back
    gradient_of: str | None = None


@dataclass(frozen=True)
class Chunk:
    """What one stage needs for one micro-batch."""

    retained: float
    received: float  # of it, what the stages before gave
    activations: float  # at its peak
    gradients: float
    taken: float = 0.0  # what crosses into it
    given: float = 0.0  # and out of it


@dataclass
class Trial:
    spans: list[StorageLifetime]
    turn: int  # when forward was over
    parameters: Mapping[str, nn.Parameter]
    notes: tuple[str, ...] = ()
    batch: int = 0  # bytes of what one micro-batch is given

    def _crossing(self, stage: int) -> float:
        """Bytes that come into `stage`."""
        return sum(span.nbytes for span in self.spans if span.received and span.stage == stage)

    def chunk(self, stage: int, passing: bool, share: Callable[[str, Tensor], float]) -> Chunk:
        """`passing`: gradients are added to or moved into what is there, so each lives for a moment only."""
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
        return Chunk(retained, received, *best, self._crossing(stage), self._crossing(stage + 1))


def trial(
    module: nn.Module, loss_of: LossOf, values: Any, live: Callable[..., Any], stages: Stages, cuts: Cuts, tensor: int = 1, recompute: bool = False
) -> Trial:  # fmt: skip
    """Run one micro-batch forward and backward on a copy of the module, without memory if that can be."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        stand_in, batch = _copy(module, fake.from_tensor), _map(values, fake.from_tensor)
        return _run(stand_in, loss_of, batch, live, stages, cuts, tensor, recompute, fake)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error).strip() else ''}".rstrip(
            ": "
        )
    try:
        with torch.random.fork_rng():
            real, batch = _copy(module, torch.clone), _map(values, torch.clone)
            tried = _run(real, loss_of, batch, live, stages, cuts, tensor, recompute, nullcontext())
        return dataclasses.replace(
            tried, notes=(f"activations measured on one real micro-batch ({why})",)
        )
    except Exception:
        return Trial(
            [],
            0,
            dict(module.named_parameters()),
            (f"without activations: the step cannot be tried ({why})",),
        )


class _Tape:
    """Writes down every storage with the place in the model where it was made."""

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
        if self.backward and gone:  # backward stands where what forward left behind is let go
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
        if not before.saved:  # what a stage gives away and does not need itself, it lets go
            before.freed = self.clock
            found.remove(before)
        found.append(here)
        self.spans.append(here)

    def save(self, tensor: Tensor) -> Tensor:
        for span in self.open.get(tensor.untyped_storage()._cdata, []):
            span.saved = span.saved or span.stage == self.stage
        return tensor


def _run(
    module: nn.Module, loss_of: LossOf, values: Any, live: Callable[..., Any], stages: Stages, cuts: Cuts, tensor: int, recompute: bool,
    mode: AbstractContextManager[Any],
) -> Trial:  # fmt: skip
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
            inputs = _map(values, torch.clone)  # a batch is made for its step
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
        return Trial(tape.spans, turn, named, batch=sum(_bytes(inputs)))
    finally:
        counter.stop()


def _mark(module: nn.Module, tape: _Tape, stages: Stages, cuts: Cuts, tensor: int) -> None:
    """Have each layer say, when it is called, which stage this is, and whether what comes is a share."""
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
        whole_out = isinstance(
            layer, nn.Embedding | nn.MultiheadAttention
        )  # cut inside, summed before it is left
        begins, ends = 0 in dims and not isinstance(layer, nn.Embedding), dims == {1}
        layer.register_forward_pre_hook(
            lambda layer, _, o=owned, b=begins, e=ends: enter(layer, o, b, e)
        )
        if whole_out and dims:
            layer.register_forward_hook(lambda *_: leave())


def blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost children of lists of layers: what people wrap, recompute and shard as one."""
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
    _map(values, lambda tensor: found.append(tensor.nbytes) or tensor)  # type: ignore[func-returns-value]
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
