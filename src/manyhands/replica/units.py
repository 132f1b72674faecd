"""Units of a network: which outputs of layers can be left out, and which parameters belong to them.

    unit      an output of a Linear or a convolution that reaches only Linears and convolutions,
              through operators that treat each channel by itself: activations, pooling, BatchNorm,
              flatten
    edges     its row of the layer's weight and bias, its elements of the parameters in between
              (BatchNorm), its column of each reader's weight

They are found on the autograd graph of one real forward pass, in which the inputs and outputs of
layers are marked. What does not fit (a residual stream, attention heads, tied weights, inputs and
outputs) has no units and is never left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.replica.parameters import ReplicaParameters
from manyhands.split.skeleton import UnitParameter

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHANNELWISE = frozenset(
    f"{name}Backward0"
    for name in (
        "Relu Gelu Tanh Sigmoid Silu LeakyRelu Elu Softplus Hardtanh Hardswish Hardsigmoid Mish "
        "LogSigmoid Threshold PreluKernel Clone ToCopy MaxPool2DWithIndices MaxPool3DWithIndices "
        "AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveMaxPool2D NativeBatchNorm CudnnBatchNorm"
    ).split()
)
RESHAPES = frozenset({"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"})


@dataclass(frozen=True)
class Gate:
    """Gate: the input of a reader, where a layer's units can be left out."""

    reader: nn.Module
    layer: int
    repeat: int  # consecutive inputs that come from one unit
    dim: int  # of the reader's input: 1 for channels, -1 for features


@dataclass(frozen=True)
class FoundUnits:
    """The units of a network: how many each layer has, their parameters and their gates."""

    sizes: tuple[int, ...]
    parameters: tuple[UnitParameter, ...]
    gates: tuple[Gate, ...]
    names: tuple[str, ...]  # of the layers that have units


def find(module: nn.Module, flat: ReplicaParameters, forward: Callable[[], Tensor]) -> FoundUnits:
    """The units of `module`; `forward` runs one forward pass of it to a loss."""
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
        path = _path(layer, graph)
        if path is None or id(layer.weight) not in views:
            continue
        readers, between = path
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


# -- the autograd graph --


class _Mark(torch.autograd.Function):
    """Identity that marks a layer's input or output in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, is_output: bool) -> Tensor:
        ctx.layer, ctx.is_output, ctx.shape = layer, is_output, tuple(x.shape)
        return x.clone()  # not a view: an activation may work in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _Graph:
    """The autograd graph behind a loss, in forward direction: the users of each node's output."""

    def __init__(self, loss: Tensor):
        # keys keep nodes alive, so that one node is one Python object
        self.users: dict[Any, list[Any]] = {loss.grad_fn: []}
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


def _path(layer: Any, graph: _Graph) -> tuple[list[tuple[Any, int]], list[Tensor]] | None:
    """The layers that read the layer's outputs, and the parameters of a unit in between.

    Of each reader also how many consecutive inputs come from one unit. None: something else than
    layers reads the outputs too.
    """
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
    """Whether each channel of a node's output depends on that channel of its input only.

    A reshape counts as such here; `_repeat` checks the shapes at both ends.
    """
    name = node.name()
    if name == "MeanBackward1":  # over positions
        sizes = node._saved_self_sym_sizes
        channel = len(sizes) - 1 if isinstance(layer, nn.Linear) else 1
        return channel not in [
            d % 2**64 % len(sizes) if d < 2**63 else (d - 2**64) % len(sizes)
            for d in node._saved_dim
        ]
    return name in CHANNELWISE or name in RESHAPES


def _repeat(layer: nn.Module, n: int, left: tuple[int, ...], mark: Any) -> int | None:
    """How many consecutive inputs of a reader come from one unit; None: that is not known."""
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
    """Evaluation mode, so that no buffer changes and nothing is dropped; restored afterwards."""
    modes = {m: m.training for m in module.modules()}
    state = torch.get_rng_state()
    module.eval()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for part, training in modes.items():
            part.training = training
