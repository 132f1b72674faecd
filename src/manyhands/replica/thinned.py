"""Thinned replica: a replica that can leave units of its network out for some steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core import OnReady, Tensors
from manyhands.data.sources import Source, StreamSource
from manyhands.errors import TaskError
from manyhands.replica.distillation import StudentReplica
from manyhands.replica.forward import TaskLoss
from manyhands.replica.module import ModuleReplica
from manyhands.replica.units import FoundUnits, Gate, find
from manyhands.replica.wrapper import ReplicaWrapper
from manyhands.split.skeleton import Units


def thinned(
    replica: ModuleReplica | ReplicaWrapper, module: nn.Module, next_loss: object, train: Source
) -> ThinnedReplica:
    """`replica`, able to leave units out. A forward pass on two samples of `train` finds them."""
    if not isinstance(next_loss, TaskLoss) or isinstance(train, StreamSource):
        given = (
            "this is a loop of its own; give a Task"
            if not isinstance(next_loss, TaskLoss)
            else "the training data is a stream; give a Dataset with a length"
        )
        raise TaskError(
            f"merge=skeleton looks at the network before training, but {given}, or choose another "
            "merge="
        )
    # on `module`, not on the module that may be compiled: its graph is one node
    look = TaskLoss(
        module,
        next_loss.batches,
        next_loss.objective,
        next_loss.precision,
        next_loss.device,
    )
    some = train.first(2)
    found = find(module, replica.flat, lambda: look.forward(train.fetch(some), len(some))[0])
    if not found.sizes:
        raise TaskError(
            "merge=skeleton found no layer whose units could be left out: needed is a Linear or "
            "convolution whose outputs go, through activations, pooling or BatchNorm, only to "
            "others; choose another merge="
        )
    units = Units(found.sizes, found.parameters)
    if isinstance(replica, StudentReplica):
        return ThinnedStudent(replica, units, found)
    return ThinnedReplica(replica, units, found)


class ThinnedReplica(ReplicaWrapper):
    """Adds `thin` to a replica, which changes its `backward` and `step`."""

    def __init__(self, inner: ModuleReplica | ReplicaWrapper, units: Units, found: FoundUnits):
        super().__init__(inner)
        self.units, self.names = units, found.names
        self._firsts = [sum(found.sizes[:i]) for i in range(len(found.sizes))]
        self._scales: Tensor | None = None
        self._shrink: Tensors | None = None
        self._elements: Tensors | None = None
        self._computing = False
        self._hooks = [
            g.reader.register_forward_pre_hook(self._gate(g, found.sizes[g.layer]))
            for g in found.gates
        ]

    def thin(self, scales: Tensor | None, elements: Tensors | None) -> None:
        """From now on leave units out of `backward` and elements out of `step`; None: nothing.

        `backward` multiplies each unit's output by its scale, where 0 leaves the unit out; the
        gradients are as large as without the scale. `step` changes only `elements` (flat vectors of
        bools) and their optimizer state.
        """
        self._scales = self._shrink = None
        self._elements = elements
        if scales is not None and not bool((scales == 1).all()):
            self._scales = scales.to(self.module_replica.device)
            # the scales of both ends of an edge enter its gradient: one through the activation,
            # the other through the gradient of the output
            inverse = torch.where(scales > 0, 1 / scales, 0)
            self._shrink = self.units.holders(inverse[None], torch.ones(1), self.inner.params)

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        if self._shrink is None:
            return self.inner.backward(on_ready)
        if on_ready is not None:
            raise ValueError(
                "gradients of a thinned network are complete only after backward; read `grads` then"
            )
        self._computing = True
        try:
            loss = self.inner.backward()
        finally:
            self._computing = False
        for k, g in self.inner.grads.items():
            g.mul_(self._shrink[k].to(g.dtype))
        return loss

    def step(self) -> None:
        if self._elements is None:
            self.inner.step()
            return
        values = self.flat.values
        before = {k: v.clone() for k, v in values.items()}
        kept = {key: m.clone() for key, m, _ in self._optimizer_state(self._elements)}
        self.inner.step()
        for k, v in values.items():
            v.copy_(torch.where(self._elements[k], v, before[k]))
        for key, m, chosen in self._optimizer_state(self._elements):
            # state that this first step has just made is 0 for an element that takes no step
            m.copy_(torch.where(chosen, m, kept.get(key, torch.zeros_like(m))))

    def close(self) -> None:
        """Remove the hooks of the gates; the inner replica closes by itself."""
        for hook in self._hooks:
            hook.remove()

    def _optimizer_state(
        self, elements: Tensors
    ) -> Iterator[tuple[tuple[int, str], Tensor, Tensor]]:
        """(key, state, chosen elements) of all optimizer state of a parameter's shape."""
        for i, p in enumerate(self.flat.views):
            chosen = torch.as_strided(elements[p.vector], p.value.shape, p.value.stride(), p.start)
            for key, m in self.module_replica.optimizer.state.get(p.parameter, {}).items():
                if isinstance(m, Tensor) and m.ndim and m.shape == p.value.shape:
                    yield (i, key), m, chosen

    def _gate(
        self, gate: Gate, units: int
    ) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        first = self._firsts[gate.layer]

        def hook(reader: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if self._scales is None or not self._computing:
                return None
            x: Tensor = inputs[0]
            scale = self._scales[first : first + units].repeat_interleave(gate.repeat).to(x.dtype)
            shape = [1] * x.ndim
            shape[gate.dim] = -1
            return (x * scale.view(shape), *inputs[1:])

        return hook


class ThinnedStudent(ThinnedReplica):
    """A thinned replica that can also distil, for a run with both merge=ensemble and skeleton."""

    def __init__(self, inner: StudentReplica, units: Units, found: FoundUnits):
        super().__init__(inner, units, found)
        self._student = inner

    def distil(self, teachers: Sequence[Tensors], weight: float, share: float) -> Tensor:
        return self._student.distil(teachers, weight, share)
