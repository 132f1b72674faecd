"""Tracer: writes down what a forward pass calls, by running it on tensors without values.

    FakeTensorMode      shapes, dtypes and aliases of everything, no arithmetic; the sizes of the
                        batch are symbols (ShapeEnv)
    TorchFunctionMode   sees every torch function and tensor method that the model calls
    Python dispatcher   composite operators (matmul) in Python, where sizes stay symbols: in C++ the
                        matmul of torch 2.11 reads plain numbers, so that the program would hold the
                        example's batch size
    subclasses          of the leaf modules' classes, for the time of the run: calls of leaf modules
                        are nodes, what they do inside is not

Numbers that the model computes from sizes are symbolic too. They become formulas over the sizes of
the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from manyhands.parallel.trace.isolation import masks_by_sizes, one_convolution_backend
from manyhands.parallel.trace.leaf_modules import alike, put_before
from manyhands.parallel.trace.node_writer import SYMBOLIC, KnownTensor, NodeWriter
from manyhands.parallel.trace.program import (
    Input,
    ParameterRef,
    TraceNode,
    ref_names,
    run_node,
    tensors,
    without_unused,
)
from manyhands.parallel.trace.source_location import (
    Untraceable,
    caller_line,
    traceback_frames,
    untraceable,
)
from manyhands.parallel.trace.symbolic_sizes import SizeGuard, symbolic_sizes
from manyhands.parallel.trace.value_dependent import run_with_values


def _depends_on_value() -> tuple[type[Exception], ...]:
    """What torch raises where a call depends on values, which fake tensors do not have."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        GuardOnDataDependentSymNode,
        DataDependentOutputException,
        DynamicOutputShapeException,
    )


class Tracer(TorchFunctionMode):
    """Tracer of one forward pass: `run` once, then read `nodes`, `output` and `size_guard`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.writer = NodeWriter(self.paths)
        self.nodes: list[TraceNode] = []
        self.output: Any = None
        self.sizes = symbolic_sizes()
        self.fake = FakeTensorMode(shape_env=self.sizes, allow_non_fake_inputs=True)
        self._inside = 0  # of leaf modules and of torch itself: nothing is written down
        self._asked: list[str] = []  # by guard of `sizes`: the line it comes from
        self._seen: dict[Any, Any] = {}  # what leaf modules returned, by module and arguments
        self._real: dict[int, Tensor] = {}  # by id of the fake tensor

    # -- the run --

    def run(
        self, example: tuple[Any, ...], leaves: set[str], call: Callable[..., Any] | None
    ) -> None:
        """Trace `model(*example)`, or `call(model, *example)`, with the leaf modules `leaves`."""
        self.example = example
        inputs = tuple(self._input(i, value) for i, value in enumerate(example))
        restored = list(
            put_before([self.model.get_submodule(path) for path in sorted(leaves)], self.leaf)
        )
        try:
            self._fake_parameters()
            with (
                one_convolution_backend(),
                torch.enable_grad(),
                masks_by_sizes(self.writer.by_sizes),
                enable_python_dispatcher(),
                self.fake,
                self,
            ):
                got = self.model(*inputs) if call is None else call(self.model, *inputs)
            self._note_guards()
            self.writer.settle()
            self._refuse_new_buffers(leaves)
            self.output = self.writer.argument(got)
        except Untraceable:
            raise
        except Exception as failed:
            raise self._explained(failed) from failed
        finally:
            for module, cls in restored:
                module.__class__ = cls
        self.nodes = without_unused(self.writer.nodes, self.output)

    def _refuse_new_buffers(self, leaves: set[str]) -> None:
        """A leaf module may replace a buffer: it will do so again when its node runs.

        Where code between leaf modules replaces one, the new buffer would be lost."""
        for path, module in self.model.named_modules():
            if not any((path + ".").startswith(leaf + ".") for leaf in leaves):
                for name, tensor in module._buffers.items():
                    if tensor is not None and id(tensor) not in self._real:
                        raise Untraceable(
                            f"{type(module).__name__} puts a new tensor in place of its buffer "
                            f"{name}; change it in place (self.{name}.copy_(...))",
                            path,
                        )

    def _input(self, argument: int, value: Any) -> Any:
        """An input of the example as fake tensors, with symbols for sizes that may differ."""
        # not at the top: importing it sets environment variables
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        writer = self.writer
        flat, spec = pytree.tree_flatten(value)
        made = []
        for i, item in enumerate(flat):
            if isinstance(item, Tensor):
                writer.device = writer.device or item.device
                ids = not item.is_floating_point()
                free = [d == 0 or ids or (d == 1 and item.ndim == 3) for d in range(item.ndim)]
                context: Any = StatelessSymbolicContext(
                    [DimDynamic.DYNAMIC if f else DimDynamic.STATIC for f in free]
                )
                source = ConstantSource(f"input_{argument}_{i}")
                fake = self.fake.from_tensor(item, symbolic_context=context, source=source)
                for dim, size in enumerate(fake.shape):
                    if isinstance(size, torch.SymInt):
                        writer.symbols.setdefault(size.node.expr, (Input(argument, i), dim))
                        self.sizes.hints[size.node.expr] = item.shape[dim]
                writer.know(fake, Input(argument, i), "")
                item = fake
            made.append(item)
        return pytree.tree_unflatten(made, spec)

    def _fake_parameters(self) -> None:
        """Give the modules parameters and buffers without values."""
        fakes: dict[int, Tensor] = {}
        for path, module in self.model.named_modules():
            own: Any
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        fake = fakes[id(tensor)] = self.fake.from_tensor(tensor, static_shapes=True)
                        ref = ParameterRef(f"{path}.{name}" if path else name)
                        self.writer.know(fake, ref, "")
                        self._real[id(fake)] = tensor
                        # the model may keep the real one in a list of its own, too
                        self.writer.known[id(tensor)] = KnownTensor(tensor, ref, None)
                    own[name] = fakes[id(tensor)]

    # -- calls --

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        self._note_guards()
        with self._within():
            return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = _versions(args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__bool__", "item") and self.writer.by_sizes(args[0]):
            with unset_fake_temporarily():
                return func(self._value_by_sizes(args[0]))
        got = func(*args, **kwargs)
        changed = [t for t, version in before if t._version != version]
        has_tensors = any(isinstance(t, Tensor) for t in pytree.tree_leaves(got))
        if not has_tensors and not changed and not self.writer.has_new_symbols(got):
            self.sizes.settle(written=False)
            return got  # a size or a dtype: what follows from it is a constant or a formula
        if name == "__get__":
            self._write("function", getattr, (args[0], func.__self__.__name__), {}, got, changed)
        elif name == "__set__":
            self._write(
                "function", setattr, (args[0], func.__self__.__name__, args[1]), {}, got, changed
            )
        elif (
            name
            and isinstance(args[0] if args else None, Tensor)
            and getattr(Tensor, name, None) is func
        ):
            self._write("method", name, args, kwargs, got, changed)
        else:
            self._write("function", func, args, kwargs, got, changed)
        return got

    def leaf(
        self, module: nn.Module, cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The model calls a leaf module."""
        if self._inside:
            return cls.__call__(module, *args, **kwargs)
        with self._within():  # conditions on sizes inside of it are not the model's own
            before = _versions(args, kwargs)
            key = alike(module, args, kwargs)
            if key in self._seen:  # of thirty equal blocks, one is run
                # cloned: it must look computed, since the next module may change it in place
                made = lambda t: torch.empty_like(t, requires_grad=t.requires_grad).clone()
                got = pytree.tree_map_only(Tensor, made, self._seen[key])
            else:
                try:
                    got = cls.__call__(module, *args, **kwargs)
                except Exception as failed:
                    got = self._leaf_by_values(module, cls, args, kwargs, failed)
            changed = [t for t, version in before if t._version != version]
            if not changed and not any(
                t is a or t._is_view() for t in tensors(got) for a, _ in before
            ):
                self._seen.setdefault(key, got)
            self._write("module", self.paths[id(module)], args, kwargs, got, changed)
        return got

    def _leaf_by_values(
        self, module: nn.Module, cls: Any, args: Any, kwargs: Any, failed: Exception
    ) -> Any:
        batch = {
            expr
            for expr, (of, dim) in self.writer.symbols.items()
            if isinstance(of, Input) and dim == 0
        }
        try:
            return run_with_values(module, cls, args, kwargs, self.sizes.hints, batch, self._real)
        except Exception:
            raise failed from None

    def _write(
        self, op: str, target: Any, args: Any, kwargs: Any, got: Any, changed: list[Tensor]
    ) -> None:
        name = self.writer.append(op, target, args, kwargs, got, changed)
        self._note_guards()
        self.sizes.settle(
            written=all(
                v is None or isinstance(v, (Tensor, *SYMBOLIC)) for v in pytree.tree_leaves(got)
            )
        )
        self.writer.returned(name, got, changed)

    def _value_by_sizes(self, tensor: Tensor) -> Tensor:
        """A tensor that follows from sizes alone, with its values for the example's sizes."""
        known, nodes = self.writer.known, self.writer.nodes
        name = known[id(tensor)].ref.name  # type: ignore[union-attr]
        wanted = {name}
        for node in reversed(nodes):
            if node.name in wanted:
                wanted.update(ref_names(node))
        values: dict[str, Any] = {}
        for node in nodes:
            if node.name in wanted:
                values[node.name] = run_node(self.model, node, self.example, values)
        made: Tensor = values[name]
        return made

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._inside += 1
        self.sizes.inside = True
        try:
            yield
        finally:
            self._inside -= 1
            self.sizes.inside = self._inside > 0

    # -- conditions on sizes --

    def _note_guards(self) -> None:
        """Note the line of the guards that are new since the last time, as far as is known."""
        if new := len(self.sizes.guards) - len(self._asked):
            self._asked += [caller_line()] * new

    def needed(self) -> dict[Any, str]:
        """The guards that the program relies on, each with the code that asked for it."""
        return {
            **self.sizes.needed,
            **{g.expr: at for g, at in zip(self.sizes.guards, self._asked, strict=True)},
        }

    def size_guard(self, example: tuple[Any, ...]) -> SizeGuard:
        """Raises for a batch whose sizes violate a guard."""
        known = {expr for expr, (of, _) in self.writer.symbols.items() if isinstance(of, Input)}
        of_inputs = lambda asked: [
            (g, at) for g, at in asked.items() if g.free_symbols and g.free_symbols <= known
        ]
        plain = {
            (i, j): v
            for i, value in enumerate(example)
            for j, v in enumerate(pytree.tree_leaves(value))
            if not isinstance(v, Tensor)
        }
        needed = self.needed()
        taken = {g: at for g, at in self.sizes.taken.items() if g not in needed}
        return SizeGuard(self.writer.input_shapes(), of_inputs(needed), of_inputs(taken), plain)

    def _explained(self, failed: Exception) -> Untraceable:
        by_value = isinstance(failed, _depends_on_value())
        reason = (
            "it asks for a value in a tensor"
            if by_value
            else f"{type(failed).__name__}: {(str(failed).strip().splitlines() or [''])[0]}"
        )
        return untraceable(reason, traceback_frames(failed), self.paths, by_value)


def _versions(args: Any, kwargs: Any) -> list[tuple[Tensor, int]]:
    return [(t, t._version) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
