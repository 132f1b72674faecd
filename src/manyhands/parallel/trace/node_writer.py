"""Node writer: turns observed calls into nodes, with references for tensors and formulas for sizes.

A tensor is known by its id: the writer keeps every tensor it has seen, so that no id is used again.
Two properties of nodes are decided here. Nodes between which a tensor is changed in place are
inseparable. A node is recomputable where it follows from the batch alone and nothing changes it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from manyhands.parallel.trace.leaf_modules import PLAIN, has_constants, is_random
from manyhands.parallel.trace.program import (
    Formula,
    Input,
    ParameterRef,
    Ref,
    StageDevice,
    TraceNode,
    Tree,
    find_refs,
    ref_names,
    tensors,
)
from manyhands.parallel.trace.source_location import (
    Untraceable,
    caller_line,
    frames_of,
    untraceable,
)
from manyhands.parallel.trace.symbolic_sizes import Evaluate

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class KnownTensor(NamedTuple):
    tensor: Tensor
    ref: Ref | Input | ParameterRef
    grad_fn: Any


class NodeWriter:
    """The nodes written so far, and what the tensors and symbols of the forward pass stand for."""

    def __init__(self, paths: Mapping[int, str]):
        self.paths = paths  # of modules, by id
        self.nodes: list[TraceNode] = []
        # (node that made a tensor first, node that changes it in place)
        self.inseparable: list[tuple[str, str]] = []
        self.known: dict[int, KnownTensor] = {}  # by id of the tensor
        self.symbols: dict[Any, tuple[Any, int | None]] = {}  # -> (Input or Ref, dimension)
        self.device: torch.device | None = None  # of the batch
        self._storages: dict[int, str] = {}  # which node made it first
        self._changed: set[int] = set()  # storages that some node changes in place
        # recomputable nodes; True: they need the sizes of the batch only
        self._recomputable: dict[str, bool] = {}
        self._count: dict[str, int] = {"output": 1}

    # -- nodes --

    def append(
        self, op: str, target: Any, args: Any, kwargs: Any, got: Any, changed: Sequence[Tensor]
    ) -> str:
        """Append a node for a call that returned `got`; returns the node's name."""
        base = (
            target if isinstance(target, str) else getattr(target, "__name__", "value").strip("_")
        )
        base = base.replace(".", "_").strip("_")
        name = self._unique(base)
        given = (
            tuple(self.argument(a) for a in args),
            {k: self.argument(a) for k, a in kwargs.items()},
        )
        recomputable = (
            op != "module"
            and not changed
            and not is_random(base)
            and not find_refs(given, ParameterRef)
            and not has_constants(given)
            and all(n in self._recomputable for n in ref_names(given))
            and not any(t.requires_grad for t in tensors(got))
        )
        if recomputable:  # by sizes alone: no value of the batch goes into it
            self._recomputable[name] = not find_refs(given, Input, inside=False) and all(
                self._recomputable[n] for n in ref_names(given)
            )
        self.nodes.append(
            TraceNode(
                name, op, target, *given, torch.is_grad_enabled(), caller_line(), recomputable
            )
        )
        return name

    def returned(self, name: str, got: Any, changed: Sequence[Tensor]) -> None:
        """Note what the node `name` returned, and the tensors that it changed in place."""
        self._note_value(Ref(name), got, name)
        for tensor in changed:
            storage = tensor.untyped_storage()._cdata
            self._changed.add(storage)
            if not isinstance(self.known[id(tensor)].ref, ParameterRef):
                self.inseparable.append((self._storages.get(storage, ""), name))

    def _note_value(self, ref: Ref, got: Any, node: str) -> None:
        """Of a structure, each tensor gets a node that takes it out."""
        if isinstance(got, Tensor):
            # a buffer that is changed in place stays a buffer
            if id(got) not in self.known or not isinstance(self.known[id(got)].ref, ParameterRef):
                self.know(got, ref, node)
            return
        if isinstance(got, torch.SymInt):
            self.symbols.setdefault(got.node.expr, (ref, None))
            return
        if isinstance(got, dict):
            items: list[tuple[Any, Any]] = list(got.items())
        elif isinstance(got, (tuple, list)):
            items = list(enumerate(got))
        else:
            return
        for key, value in items:
            if isinstance(value, (Tensor, torch.SymInt, tuple, list, dict)):
                name = self._unique(f"{ref.name}_{key}")
                recomputable = ref.name in self._recomputable
                if recomputable:
                    self._recomputable[name] = self._recomputable[ref.name]
                self.nodes.append(
                    TraceNode(
                        name, "function", operator.getitem, (ref, key), recomputable=recomputable
                    )
                )
                self._note_value(Ref(name), value, node)

    def _unique(self, base: str) -> str:
        self._count[base] = self._count.get(base, 0) + 1
        return base if self._count[base] == 1 else self._unique(f"{base}_{self._count[base] - 1}")

    def settle(self) -> None:
        """At the end: what is changed in place, and all that depends on it, is not recomputable."""
        no = {
            k.ref.name
            for k in self.known.values()
            if isinstance(k.ref, Ref) and k.tensor.untyped_storage()._cdata in self._changed
        }
        for i, node in enumerate(self.nodes):
            if node.recomputable and (node.name in no or no.intersection(ref_names(node))):
                no.add(node.name)
                self.nodes[i] = replace(node, recomputable=False)

    # -- tensors and symbols --

    def know(self, tensor: Tensor, ref: Ref | Input | ParameterRef, node: str) -> None:
        """From here on `tensor`, which `node` made, is written as `ref`."""
        self.known[id(tensor)] = KnownTensor(tensor, ref, tensor.grad_fn)
        self._storages.setdefault(tensor.untyped_storage()._cdata, node)

    def by_sizes(self, value: Any) -> bool:
        """Whether a tensor follows from the sizes of the batch alone, such as positions."""
        known = self.known.get(id(value))
        return (
            known is not None
            and isinstance(known.ref, Ref)
            and self._recomputable.get(known.ref.name, False)
        )

    def has_new_symbols(self, got: Any) -> bool:
        return any(
            isinstance(s, torch.SymInt)
            and any(x not in self.symbols for x in s.node.expr.free_symbols)
            for s in pytree.tree_leaves(got)
        )

    def input_shapes(self) -> dict[Input, tuple[Any, ...]]:
        """The shapes of the batch's tensors, with symbols for sizes that may differ."""
        given = [(k.ref, k.tensor.shape) for k in self.known.values() if isinstance(k.ref, Input)]
        return {
            ref: tuple(s.node._expr if isinstance(s, torch.SymInt) else s for s in shape)
            for ref, shape in given
        }

    # -- arguments --

    def argument(self, value: Any) -> Any:
        """An argument as a node has it: references for tensors, formulas for sizes."""
        if isinstance(value, Tensor):
            if id(value) in self.known:
                _, ref, grad_fn = self.known[id(value)]
                if value.grad_fn is not grad_fn and isinstance(
                    value.grad_fn, torch.autograd.function.BackwardCFunction
                ):
                    raise self._refused(
                        f"{type(value.grad_fn).__name__}: an autograd.Function outside of a module "
                        "of its own"
                    )
                return ref
            if isinstance(value, FakeTensor):
                raise self._refused("it uses a tensor that no traced call has made")
            return value  # a constant of the model's that is no buffer
        if isinstance(value, SYMBOLIC):
            return self._formula(value)
        if isinstance(value, torch.Size):
            return tuple(self.argument(v) for v in value)
        if isinstance(value, torch.device):
            on_batch = self.device is not None and value.type == self.device.type
            return StageDevice() if on_batch else value
        if type(value) in (tuple, list):
            return type(value)(self.argument(v) for v in value)
        if type(value) is dict:
            return {k: self.argument(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(*(self.argument(v) for v in (value.start, value.stop, value.step)))
        if value is ... or isinstance(value, (*PLAIN, torch.Generator)) or callable(value):
            return value
        flat, spec = pytree.tree_flatten(value)
        if len(flat) == 1 and flat[0] is value:
            raise self._refused(
                f"it passes on a {type(value).__name__}, whose contents cannot be traced"
            )
        return Tree(spec, tuple(self.argument(v) for v in flat))

    def _formula(self, value: Any) -> Any:
        expr = value.node.expr
        if not expr.free_symbols:
            return value.node.pytype(expr)
        symbols = sorted(expr.free_symbols, key=str)
        if missing := [s for s in symbols if s not in self.symbols]:
            raise self._refused(f"the number {missing[0]} comes out of a tensor")
        where = [self.symbols[s] for s in symbols]
        return Formula(
            str(expr),
            Evaluate(expr, tuple(symbols)),
            tuple(w[0] for w in where),
            tuple(w[1] for w in where),
        )

    def _refused(self, reason: str) -> Untraceable:
        return untraceable(reason, list(frames_of(sys._getframe(1))), self.paths)
