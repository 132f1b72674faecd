"""A replica that can leave units of its network out for a while, and where the edges of each unit lie.

    unit      an output of a Linear or a convolution that reaches only Linears and convolutions, and on the way only what treats
              each channel by itself: activations, pooling, BatchNorm, flatten
    edges     its row of the layer's weight and bias, what the way keeps for it (BatchNorm), its column of each reader

Found on the autograd graph of one real forward pass, in which the ways in and out of layers are marked. What does not fit the
description (a residual stream, attention heads, tied weights, inputs and outputs) has no units and is always whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.core import OnReady, Tensors
from manyhands.data.sources import Source, StreamSource, TensorSource
from manyhands.errors import TaskError
from manyhands.replica.flat import FlatParameters
from manyhands.replica.forward import TaskLoss
from manyhands.split.skeleton import UnitParameter, Units

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHANNELWISE = frozenset(
    f"{name}Backward0"
    for name in "Relu Gelu Tanh Sigmoid Silu LeakyRelu Elu Softplus Hardtanh Hardswish Hardsigmoid Mish LogSigmoid Threshold PreluKernel"
    " Clone ToCopy MaxPool2DWithIndices MaxPool3DWithIndices AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveMaxPool2D"
    " NativeBatchNorm CudnnBatchNorm".split()
)
RESHAPES = frozenset({"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"})


@dataclass(frozen=True)
class Gate:
    """Where a layer's units go into one of their readers."""

    reader: nn.Module
    layer: int
    repeat: int
    dim: int  # of the reader's input: 1 for channels, -1 for features


@dataclass(frozen=True)
class FoundUnits:
    sizes: tuple[int, ...]
    parameters: tuple[UnitParameter, ...]
    gates: tuple[Gate, ...]
    names: tuple[str, ...]  # of the layers that have units


def find(module: nn.Module, flat: FlatParameters, forward: Callable[[], Tensor]) -> FoundUnits:
    """The units of `module`, of which `forward` runs one pass to a loss."""
    layers = {
        n: m
        for n, m in module.named_modules()
        if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    with _marked(layers), _undisturbed(module), torch.enable_grad():
        loss = forward()
    graph = _Graph(loss)
    views = {id(p.parameter): p for p in flat.views}
    sides: dict[int, dict[int, tuple[int, int]]] = {}  # parameter -> dimension -> (layer, repeat)
    sizes: list[int] = []
    gates: list[Gate] = []
    names: list[str] = []
    for name, layer in layers.items():
        way = _way(layer, graph)
        if way is None or id(layer.weight) not in views:
            continue
        readers, between = way
        if any(id(r.weight) not in views or not graph.used_once(r.weight) for r, _ in readers):
            continue
        index, n = len(sizes), layer.weight.shape[0]
        sizes.append(n)
        names.append(name)
        for p in [layer.weight, layer.bias, *between]:
            if p is not None and id(p) in views:
                sides.setdefault(id(p), {})[0] = (index, 1)
        for reader, repeat in readers:
            sides.setdefault(id(reader.weight), {})[1] = (index, repeat)
            gates.append(Gate(reader, index, repeat, -1 if isinstance(reader, nn.Linear) else 1))
    parameters = []
    for key, dims in sides.items():
        view = views[key]
        where = tuple((dim, index, repeat) for dim, (index, repeat) in sorted(dims.items()))
        parameters.append(
            UnitParameter(
                view.name,
                view.vector,
                view.start,
                tuple(view.value.shape),
                tuple(view.value.stride()),
                where,
            )
        )
    return FoundUnits(tuple(sizes), tuple(parameters), tuple(gates), tuple(names))


def thinned(
    replica: Any,
    module: nn.Module,
    next_loss: object,
    train: Source,
) -> ThinnedReplica:
    """`replica`, able to leave units out. A forward pass on two samples of `train` finds them."""
    if not isinstance(next_loss, TaskLoss) or isinstance(train, StreamSource):
        given = (
            "this is a loop of its own; give a Task"
            if not isinstance(next_loss, TaskLoss)
            else "the training data is a stream; give a Dataset with a length"
        )
        raise TaskError(
            f"merge=skeleton looks at the network before training, but {given}, or choose another merge="
        )
    # not the one that may be compiled: its graph is one node
    look = TaskLoss(
        module,
        next_loss.batches,
        next_loss.loss,
        next_loss.step,
        next_loss.precision,
        next_loss.device,
    )
    where = train.device if isinstance(train, TensorSource) else torch.device("cpu")
    some = torch.arange(min(2, train.samples), device=where)
    found = find(module, replica.flat, lambda: look.forward(train.fetch(some), len(some))[0])
    if not found.sizes:
        raise TaskError(
            "merge=skeleton found no layer whose units could be left out: needed is a Linear or convolution whose outputs go, by way of "
            "activations, pooling or BatchNorm, only to others; choose another merge="
        )
    return ThinnedReplica(replica, Units(found.sizes, found.parameters), found)


class ThinnedReplica:
    """Wraps a replica; everything but `thin`, and what it does to `backward` and `step`, goes through to it."""

    def __init__(self, inner: Any, units: Units, found: FoundUnits):
        self.inner, self.units, self.names = inner, units, found.names
        self._firsts = [sum(found.sizes[:i]) for i in range(len(found.sizes))]
        self._scales: Tensor | None = None
        self._shrink: Tensors | None = None
        self._elements: Tensors | None = None
        self._computing = False
        self._hooks = [
            g.reader.register_forward_pre_hook(self._gate(g, found.sizes[g.layer]))
            for g in found.gates
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def thin(self, scales: Tensor | None, elements: Tensors | None) -> None:
        """From here on `backward` multiplies each unit by its scale, 0 leaves it out, and gives gradients as large as if it did not;
        `step` changes only `elements` (flat vectors of bools) and what the optimizer remembers of them; None: all."""
        self._scales = self._shrink = None
        self._elements = elements
        if scales is not None and not bool((scales == 1).all()):
            self._scales = scales.to(self.inner.device)
            # an edge meets the scale of its unit at each end, in the activation on one side and in the gradient on the other
            inverse = torch.where(scales > 0, 1 / scales, 0)
            self._shrink = self.units.holders(inverse[None], torch.ones(1), self.inner.params)

    def backward(self, on_ready: OnReady | None = None) -> Tensor:
        if self._shrink is None:
            plain: Tensor = self.inner.backward(on_ready)
            return plain
        if on_ready is not None:
            raise ValueError(
                "gradients of a thinned network are complete only when backward is over; ask for `grads` then"
            )
        self._computing = True
        try:
            loss: Tensor = self.inner.backward()
        finally:
            self._computing = False
        for k, g in self.inner.grads.items():
            g.mul_(self._shrink[k].to(g.dtype))
        return loss

    def step(self) -> None:
        if self._elements is None:
            self.inner.step()
            return
        flat: FlatParameters = self.inner.flat
        before = {k: v.clone() for k, v in flat.values.items()}
        remembered = {key: m.clone() for key, m, _ in self._remembered(self._elements)}
        self.inner.step()
        for k, v in flat.values.items():
            v.copy_(torch.where(self._elements[k], v, before[k]))
        for key, m, chosen in self._remembered(self._elements):
            # what the first step has just made for an element that takes none is nothing yet
            m.copy_(torch.where(chosen, m, remembered.get(key, torch.zeros_like(m))))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _remembered(self, elements: Tensors) -> Iterator[tuple[tuple[int, str], Tensor, Tensor]]:
        for i, p in enumerate(self.inner.flat.views):
            chosen = torch.as_strided(elements[p.vector], p.value.shape, p.value.stride(), p.start)
            for key, m in self.inner.optimizer.state.get(p.parameter, {}).items():
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


# -- looking at the network --


class _Mark(torch.autograd.Function):
    """Leaves x as it is and its name in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, is_output: bool) -> Tensor:
        ctx.layer, ctx.is_output, ctx.shape = layer, is_output, tuple(x.shape)
        return x.clone()  # not a view: an activation may work in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _Graph:
    """The autograd graph behind a loss, from front to back: who uses what a node gives."""

    def __init__(self, loss: Tensor):
        self.users: dict[Any, list[Any]] = {
            loss.grad_fn: []
        }  # keys keep nodes alive, so that one node is one object
        self.outputs: dict[nn.Module, list[Any]] = {}
        self._uses: dict[int, int] = {}
        todo: list[Any] = [loss.grad_fn]
        while todo:
            node = todo.pop()
            if getattr(node, "is_output", False):
                self.outputs.setdefault(node.layer, []).append(node)
            for before, _ in node.next_functions:
                if before is None:
                    continue
                if before not in self.users:
                    self.users[before] = []
                    todo.append(before)
                self.users[before].append(node)
        for node, users in self.users.items():
            if hasattr(node, "variable"):
                self._uses[id(node.variable)] = len(users)

    def used_once(self, parameter: Tensor) -> bool:
        return self._uses.get(id(parameter)) == 1


def _way(layer: Any, graph: _Graph) -> tuple[list[tuple[Any, int]], list[Tensor]] | None:
    """Who reads the layer's outputs, with how many numbers of theirs come from one unit, and the parameters of a unit on the way;
    None: somebody else reads them too."""
    if len(marks := graph.outputs.get(layer, [])) != 1 or not graph.used_once(layer.weight):
        return None
    mark, n = marks[0], layer.weight.shape[0]
    readers: list[tuple[Any, int]] = []
    between: list[Tensor] = []
    todo, seen = list(graph.users[mark]), {mark}
    if not todo:
        return None
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        before = [b for b, _ in node.next_functions if b is not None]
        own = [b.variable for b in before if hasattr(b, "variable")]
        if hasattr(node, "is_output"):
            repeat = None if node.is_output else _repeat(layer, n, mark.shape, node)
            if repeat is None:
                return None
            readers.append((node.layer, repeat))
            continue
        alone = len(before) - len(own) == 1 and all(
            p.shape == (n,) and graph.used_once(p) for p in own
        )
        if not alone or not _by_channel(node, layer) or not graph.users[node]:
            return None
        seen.add(node)
        between += own
        todo += graph.users[node]
    if len({id(r) for r, _ in readers}) < len(readers):
        return None
    return readers, between


def _by_channel(node: Any, layer: nn.Module) -> bool:
    """Whether each channel of what a node gives depends on that channel only. A reshape does if the shapes at both ends say so."""
    name = node.name()
    if name == "MeanBackward1":  # over places
        sizes = node._saved_self_sym_sizes
        channel = len(sizes) - 1 if isinstance(layer, nn.Linear) else 1
        return channel not in [
            d % 2**64 % len(sizes) if d < 2**63 else (d - 2**64) % len(sizes)
            for d in node._saved_dim
        ]
    return name in CHANNELWISE or name in RESHAPES


def _repeat(layer: nn.Module, n: int, left: tuple[int, ...], mark: Any) -> int | None:
    """How many numbers in a row of a reader's input come from one unit; None: that cannot be said."""
    reader, came = mark.layer, mark.shape
    if isinstance(layer, nn.Linear):
        return 1 if isinstance(reader, nn.Linear) and came[-1] == n else None
    if isinstance(reader, nn.Linear):  # flattened, channel after channel
        flat = len(came) == 2 and len(left) > 2 and came[0] == left[0] and came[1] % n == 0
        return came[1] // n if flat else None
    return 1 if len(came) == len(left) and came[1] == n and reader.groups == 1 else None


@contextlib.contextmanager
def _marked(layers: dict[str, Any]) -> Iterator[None]:
    def on_input(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_Mark.apply(inputs[0], layer, False), *inputs[1:])

    def on_output(layer: nn.Module, inputs: Any, output: Tensor) -> Any:
        return _Mark.apply(output, layer, True)

    hooks = [
        h
        for m in layers.values()
        for h in (m.register_forward_pre_hook(on_input), m.register_forward_hook(on_output))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, so that no buffer moves and nothing is dropped out; afterwards everything is as it was."""
    modes = {m: m.training for m in module.modules()}
    state = torch.get_rng_state()
    module.eval()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for part, training in modes.items():
            part.training = training
