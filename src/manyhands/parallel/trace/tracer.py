"""Writes down what a forward pass does, by running it on tensors without values.

    FakeTensorMode          shapes, dtypes and aliases of everything, no arithmetic; sizes of the batch are symbols (ShapeEnv)
    TorchFunctionMode       every torch function and tensor method that the model calls passes by here
    a class put before      the classes of leaf modules, for the time of the run: their calls are steps, what is inside is not

Numbers that the model computes from sizes are symbolic too, and become formulas over the sizes of the inputs.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    StatelessSymbolicContext,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from manyhands.parallel.trace import program
from manyhands.parallel.trace.isolation import (
    Untraceable,
    as_it_was,
    frames_of,
    is_ours,
    line,
    masks_by_sizes,
    one_way_to_convolve,
    place,
    real_state,
)
from manyhands.parallel.trace.program import (
    Formula,
    Here,
    Input,
    ParameterRef,
    Ref,
    TracedProgram,
    TraceNode,
    Tree,
    mentions,
    names,
    run,
    tensors,
)
from manyhands.parallel.trace.symbolic_sizes import (
    Evaluate,
    SizeGuard,
    Sizes,
    hold,
    others,
    resized,
    several,
    with_values,
    without_values,
)
from manyhands.replica.leaf_modules import (
    PLAIN,
    alike,
    by_chance,
    has_constants,
    put_before,
)

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def record(
    model: nn.Module, example: tuple[Any, ...], leaves: set[str], call: Callable[..., Any] | None
) -> TracedProgram:
    """Both modes of the model, with `leaves` (paths) as steps; raises Untraceable."""
    example = pytree.tree_map_only(Tensor, several, example)
    runs = {mode: _record(model, mode, example, leaves, call) for mode in (True, False)}
    check: dict[bool, Callable[[tuple[Any, ...]], None]] = {}
    for mode, made in runs.items():
        _try_other_sizes(made, partial(_record, model, mode, leaves=leaves, call=call))
        check[mode] = made.check(example)
    at = {step.name: i for i, step in enumerate(runs[True].steps)}
    together = [(at.get(a, -1), at[b]) for a, b in runs[True].together]
    return TracedProgram(
        model,
        {m: r.steps for m, r in runs.items()},
        {m: r.output for m, r in runs.items()},
        together,
        check,
    )


def _record(
    model: nn.Module, mode: bool, example: tuple[Any, ...], leaves: set[str], call: Any
) -> Tracer:
    with as_it_was(model):
        if model.training != mode:
            model.train(mode)
        made = Tracer(model)
        made.output = made.run(example, leaves, call)
    made.steps = program.without_unused(made.steps, made.output)
    return made


def _try_other_sizes(first: Tracer, record: Callable[[tuple[Any, ...]], Tracer]) -> None:
    """Forget what torch asked inside of steps where the same steps, with the same formulas, are written down for sizes that answer
    it otherwise. What then is left is refused in a batch: a size that follows from the answer may stand in a step as a constant."""
    needed = first.needed()
    for sizes in others(
        first.shapes.hints,
        {s for s, (_, dim) in first.symbols.items() if dim == 0},
        lambda: first.shapes.taken,
    ):
        if hold(needed, sizes) and not hold(first.shapes.taken, sizes):
            try:
                again = record(resized(first.example, first.shapes_given(), sizes))
            except Untraceable:
                continue
            if repr((again.steps, again.output)) == repr((first.steps, first.output)):
                first.shapes.taken = {
                    g: at for g, at in first.shapes.taken.items() if hold([g], sizes)
                }


class Tracer(TorchFunctionMode):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.steps: list[TraceNode] = []
        self.together: list[
            tuple[str, str]
        ] = []  # (first step that made it, step that changes it in place)
        self.known: dict[
            int, tuple[Tensor, Any, Any]
        ] = {}  # by id; the tensor is kept so that its id stays its own
        self.storages: dict[int, str] = {}  # which step made it first
        self.symbols: dict[
            Any, tuple[Any, int | None]
        ] = {}  # sympy symbol -> (Input or Ref, dimension)
        self.asked: list[str] = []  # about where each guard of `shapes` comes from
        self.inside = 0  # of leaf modules and of torch itself: nothing is written down
        self.count: dict[str, int] = {"output": 1}
        self.shapes = Sizes()
        self.output: Any = None
        self.fake = FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=True)
        self.device: torch.device | None = None
        self.paths: dict[int, str] = {}
        self.again: dict[
            str, bool
        ] = {}  # steps that may be done again; True: they need only the sizes of the batch
        self.seen: dict[Any, Any] = {}  # what leaves returned, by what they are and were given
        self.changed: set[int] = set()  # storages that some step changes
        self.real: dict[int, Tensor] = {}  # by the id of what stands in its place

    # -- the run --

    def run(
        self, example: tuple[Any, ...], leaves: set[str], call: Callable[..., Any] | None
    ) -> Any:
        for path, module in self.model.named_modules():
            self.paths[id(module)] = path
        self.example = example
        inputs = tuple(self._input(i, value) for i, value in enumerate(example))
        restored = list(
            put_before([self.model.get_submodule(path) for path in sorted(leaves)], self.leaf)
        )
        try:
            self._hold()
            with (
                one_way_to_convolve(),
                torch.enable_grad(),
                masks_by_sizes(self.by_sizes),
                self.fake,
                self,
            ):
                got = self.model(*inputs) if call is None else call(self.model, *inputs)
            self._note()
            self._settle()
            self._refuse_new_buffers(leaves)
            return self._argument(got)
        except Untraceable:
            raise
        except Exception as failed:
            raise self._told(failed) from failed
        finally:
            for module, cls in restored:
                module.__class__ = cls

    def _refuse_new_buffers(self, leaves: set[str]) -> None:
        """A leaf may put a new tensor in place of a buffer: it will again. What code between leaves does so would be lost."""
        for path, module in self.model.named_modules():
            if not any((path + ".").startswith(leaf + ".") for leaf in leaves):
                for name, tensor in module._buffers.items():
                    if tensor is not None and id(tensor) not in self.real:
                        what = f"{type(module).__name__} puts a new tensor in place of its buffer {name}; change it in place"
                        raise Untraceable(f"{what} (self.{name}.copy_(...))", path)

    def _note(self) -> None:
        """Where sizes were asked for since the last time, as far as it can be told."""
        if new := len(self.shapes.guards) - len(self.asked):
            self.asked += [line()] * new

    def _settle(self) -> None:
        """What is changed in place later, and all that is made of it, is not to be made again."""
        no = {
            as_.name
            for t, as_, _ in self.known.values()
            if isinstance(as_, Ref) and t.untyped_storage()._cdata in self.changed
        }
        for i, step in enumerate(self.steps):
            if step.again and (step.name in no or no.intersection(names(step))):
                no.add(step.name)
                self.steps[i] = replace(step, again=False)

    def _input(self, argument: int, value: Any) -> Any:
        from torch._dynamo.source import (
            ConstantSource,  # not at the top: importing it sets environment variables
        )

        flat, spec = pytree.tree_flatten(value)
        made = []
        for i, item in enumerate(flat):
            if isinstance(item, Tensor):
                self.device = self.device or item.device
                ids = not item.is_floating_point()
                free = [d == 0 or ids or (d == 1 and item.ndim == 3) for d in range(item.ndim)]
                context: Any = StatelessSymbolicContext(
                    [DimDynamic.DYNAMIC if f else DimDynamic.STATIC for f in free]
                )
                source = ConstantSource(f"input_{argument}_{i}")
                fake = self.fake.from_tensor(item, symbolic_context=context, source=source)
                for dim, size in enumerate(fake.shape):
                    if isinstance(size, torch.SymInt):
                        self.symbols.setdefault(size.node.expr, (Input(argument, i), dim))
                        self.shapes.hints[size.node.expr] = item.shape[dim]
                self._know(fake, Input(argument, i), "")
                item = fake
            made.append(item)
        return pytree.tree_unflatten(made, spec)

    def _hold(self) -> None:
        """Give the modules parameters and buffers without values."""
        fakes: dict[int, Tensor] = {}
        for path, module in self.model.named_modules():
            own: Any
            for own in (module._parameters, module._buffers):
                for name, tensor in own.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = self.fake.from_tensor(tensor, static_shapes=True)
                        held = ParameterRef(f"{path}.{name}" if path else name)
                        self._know(fakes[id(tensor)], held, "")
                        self.real[id(fakes[id(tensor)])] = tensor
                        self.known[id(tensor)] = (
                            tensor,
                            held,
                            None,
                        )  # kept by the model in a list of its own, too
                    own[name] = fakes[id(tensor)]

    # -- what passes by --

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        self._note()
        with self._within():
            return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = _versions(args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__bool__", "item") and self.by_sizes(args[0]):
            with unset_fake_temporarily():
                return func(self._now(args[0]))
        got = func(*args, **kwargs)
        changed = [t for t, version in before if t._version != version]
        tensors = any(isinstance(t, Tensor) for t in pytree.tree_leaves(got))
        if not tensors and not changed and not self._new_symbols(got):
            self.shapes.settle(written=False)
            return (
                got  # a size, a dtype, a question: what follows from it is a constant or a formula
            )
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
        """A leaf module is called."""
        if self.inside:
            return cls.__call__(module, *args, **kwargs)
        with self._within():  # what we ask here is no question of the model's either
            before = _versions(args, kwargs)
            key = alike(module, args, kwargs)
            if key in self.seen:  # thirty blocks that are alike: one tells for all
                # cloned: as what was computed, the next module may change it in place
                made = lambda t: torch.empty_like(t, requires_grad=t.requires_grad).clone()
                got = pytree.tree_map_only(Tensor, made, self.seen[key])
            else:
                try:
                    got = cls.__call__(module, *args, **kwargs)
                except Exception as failed:
                    got = self._by_values(module, cls, args, kwargs, failed)
            changed = [t for t, version in before if t._version != version]
            if not changed and not any(
                t is a or t._is_view() for t in tensors(got) for a, _ in before
            ):
                self.seen.setdefault(key, got)
            self._write("module", self.paths[id(module)], args, kwargs, got, changed)
        return got

    def by_sizes(self, value: Any) -> bool:
        """Whether a tensor follows from the sizes of the batch alone, such as positions and what is asked of them."""
        as_ = self.known.get(id(value), (None, None, None))[1]
        return isinstance(as_, Ref) and self.again.get(as_.name, False)

    def _now(self, tensor: Tensor) -> Tensor:
        """Such a tensor with its values, for the example's sizes."""
        wanted = {self.known[id(tensor)][1].name}
        for step in reversed(self.steps):
            if step.name in wanted:
                wanted.update(names(step))
        values: dict[str, Any] = {}
        for step in self.steps:
            if step.name in wanted:
                values[step.name] = run(self.model, step, self.example, values)
        made: Tensor = values[self.known[id(tensor)][1].name]
        return made

    @contextmanager
    def _within(self) -> Iterator[None]:
        self.inside += 1
        self.shapes.inside = True
        try:
            yield
        finally:
            self.inside -= 1
            self.shapes.inside = self.inside > 0

    # -- writing it down --

    def _write(
        self, op: str, target: Any, args: Any, kwargs: Any, got: Any, changed: Sequence[Tensor]
    ) -> None:
        base = (
            target if isinstance(target, str) else getattr(target, "__name__", "value").strip("_")
        )
        base = base.replace(".", "_").strip("_")
        name = self._name(base)
        given = (
            tuple(self._argument(a) for a in args),
            {k: self._argument(a) for k, a in kwargs.items()},
        )
        again = (
            op != "module"
            and not changed
            and not by_chance(base)
            and not mentions(given, ParameterRef)
            and not has_constants(given)
        )
        again = (
            again
            and all(n in self.again for n in names(given))
            and not any(t.requires_grad for t in tensors(got))
        )
        if again:  # by sizes alone: nothing in it comes from the values of the batch
            self.again[name] = not mentions(given, Input, inside=False) and all(
                self.again[n] for n in names(given)
            )
        self.steps.append(
            TraceNode(name, op, target, *given, torch.is_grad_enabled(), line(), again)
        )
        self._note()
        self.shapes.settle(
            written=all(
                v is None or isinstance(v, (Tensor, *SYMBOLIC)) for v in pytree.tree_leaves(got)
            )
        )
        self._made(Ref(name), got, name)
        for tensor in changed:
            self.changed.add(tensor.untyped_storage()._cdata)
            first = self.storages.get(tensor.untyped_storage()._cdata, "")
            if not isinstance(self.known[id(tensor)][1], ParameterRef):
                self.together.append((first, name))

    def _made(self, ref: Ref, got: Any, step: str) -> None:
        """Remember what a step returned; of a structure, each tensor by a step that takes it out."""
        if isinstance(got, Tensor):
            if id(got) not in self.known or not isinstance(
                self.known[id(got)][1], ParameterRef
            ):  # a buffer changed in place stays one
                self._know(got, ref, step)
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
                name = self._name(f"{ref.name}_{key}")
                again = ref.name in self.again
                if again:
                    self.again[name] = self.again[ref.name]
                self.steps.append(
                    TraceNode(name, "function", operator.getitem, (ref, key), again=again)
                )
                self._made(Ref(name), value, step)

    def _name(self, base: str) -> str:
        self.count[base] = self.count.get(base, 0) + 1
        return base if self.count[base] == 1 else self._name(f"{base}_{self.count[base] - 1}")

    def _know(self, tensor: Tensor, as_: Any, step: str) -> None:
        self.known[id(tensor)] = tensor, as_, tensor.grad_fn
        self.storages.setdefault(tensor.untyped_storage()._cdata, step)

    def _new_symbols(self, got: Any) -> bool:
        return any(
            isinstance(s, torch.SymInt)
            and any(x not in self.symbols for x in s.node.expr.free_symbols)
            for s in pytree.tree_leaves(got)
        )

    def _argument(self, value: Any) -> Any:
        """As it stands in a step: names in place of tensors, formulas in place of sizes."""
        if isinstance(value, Tensor):
            if id(value) in self.known:
                _, as_, grad_fn = self.known[id(value)]
                if value.grad_fn is not grad_fn and isinstance(
                    value.grad_fn, torch.autograd.function.BackwardCFunction
                ):
                    raise self._refused(
                        f"{type(value.grad_fn).__name__}: an autograd.Function outside of a module of its own"
                    )
                return as_
            if isinstance(value, FakeTensor):
                raise self._refused("a tensor is used of which nobody saw how it was made")
            return value  # a constant of the model's that is no buffer
        if isinstance(value, SYMBOLIC):
            return self._formula(value)
        if isinstance(value, torch.Size):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, torch.device):
            return Here() if self.device is not None and value.type == self.device.type else value
        if type(value) in (tuple, list):
            return type(value)(self._argument(v) for v in value)
        if type(value) is dict:
            return {k: self._argument(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(v) for v in (value.start, value.stop, value.step)))
        if value is ... or isinstance(value, (*PLAIN, torch.Generator)) or callable(value):
            return value
        flat, spec = pytree.tree_flatten(value)
        if len(flat) == 1 and flat[0] is value:
            raise self._refused(
                f"a {type(value).__name__} is passed on, and what is in it cannot be known"
            )
        return Tree(spec, tuple(self._argument(v) for v in flat))

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

    # -- a leaf that looks at values --

    def _by_values(
        self, module: nn.Module, cls: Any, args: Any, kwargs: Any, failed: Exception
    ) -> Any:
        """What a leaf gives that cannot run without values: run it on some, for two sizes of the batch, to see what it returns."""
        batch = {
            expr for expr, (of, dim) in self.symbols.items() if isinstance(of, Input) and dim == 0
        }
        runs = []
        try:
            with (
                unset_fake_temporarily(),
                torch.no_grad(),
                torch.random.fork_rng(),
                real_state(module, self.real),
            ):
                for more in (0, 1):
                    sizes = {
                        expr: size + more * (expr in batch)
                        for expr, size in self.shapes.hints.items()
                    }
                    given = pytree.tree_map_only(
                        Tensor, partial(with_values, sizes=sizes), (args, kwargs)
                    )
                    runs.append(pytree.tree_flatten(cls.__call__(module, *given[0], **given[1])))
            (few, spec), (many, _) = runs
            one = next(
                size
                for t in pytree.tree_leaves((args, kwargs))
                if isinstance(t, Tensor)
                for size in t.shape[:1]
            )
            made = [
                without_values(a, b, one) if isinstance(a, Tensor) else a
                for a, b in zip(few, many, strict=True)
            ]
            return pytree.tree_unflatten(made, spec)
        except Exception:
            raise failed from None

    def shapes_given(self) -> dict[Input, tuple[Any, ...]]:
        given = [
            (as_, tensor.shape) for tensor, as_, _ in self.known.values() if isinstance(as_, Input)
        ]
        return {
            as_: tuple(s.node._expr if isinstance(s, torch.SymInt) else s for s in shape)
            for as_, shape in given
        }

    def needed(self) -> dict[Any, str]:
        """What must hold for the model to do the same, and the code that asked for it."""
        return {
            **self.shapes.needed,
            **{g.expr: at for g, at in zip(self.shapes.guards, self.asked, strict=True)},
        }

    def check(self, example: tuple[Any, ...]) -> SizeGuard:
        known = {expr for expr, (of, _) in self.symbols.items() if isinstance(of, Input)}
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
        taken = {g: at for g, at in self.shapes.taken.items() if g not in needed}
        return SizeGuard(self.shapes_given(), of_inputs(needed), of_inputs(taken), plain)

    def _refused(self, reason: str) -> Untraceable:
        frames = list(frames_of(sys._getframe(1)))
        return Untraceable(f"{place(frames)}: {reason}", self._module(frames))

    def _told(self, failed: Exception) -> Untraceable:
        frames = []
        trace = failed.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        frames.reverse()
        by_value = isinstance(
            failed,
            (
                GuardOnDataDependentSymNode,
                DataDependentOutputException,
                DynamicOutputShapeException,
            ),
        )
        reason = (
            "it asks for a value in a tensor"
            if by_value
            else f"{type(failed).__name__}: {(str(failed).strip().splitlines() or [''])[0]}"
        )
        return Untraceable(f"{place(frames)}: {reason}", self._module(frames), by_value)

    def _module(self, frames: Sequence[tuple[Any, int]]) -> str:
        """The path of the module in whose forward pass it happened."""
        for frame, _ in frames:
            owner = frame.f_locals.get("self")
            if (
                isinstance(owner, nn.Module)
                and id(owner) in self.paths
                and not is_ours(frame.f_code.co_filename)
            ):
                return self.paths[id(owner)]
        return ""


def _versions(args: Any, kwargs: Any) -> list[tuple[Tensor, int]]:
    return [(t, t._version) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
