"""Build recorder: runs a model function on tensors without memory and writes down what it does.

The model's code sees CPU tensors: `device` says "cpu", `item()` and `tolist()` answer with values
that are made at once. Code that cannot be recorded raises `NotDeferrable`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from manyhands.replica.deferred.operations import (
    Constant,
    DrawsFrom,
    Operation,
    Operations,
    StorageView,
)
from manyhands.replica.deferred.untouched_memory import untouched

aten = torch.ops.aten
CPU = torch.device("cpu")
META = torch.device("meta")
# operations that write every element and read none
OVERWRITES = frozenset(
    {
        aten.normal_.default,
        aten.uniform_.default,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
        aten.bernoulli_.float,
        aten.exponential_.default,
        aten.log_normal_.default,
        aten.cauchy_.default,
        aten.geometric_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.copy_.default,
    }
)
SETS = frozenset({aten.set_.source_Tensor})  # a tensor takes the memory of another
RESIZES = ("resize_", "resize_as_", "set_", "as_strided_scatter")


class NotDeferrable(Exception):
    """The model's code does what cannot be recorded."""


class BuildRecorder(TorchDispatchMode):
    """Gives code tensors without memory, and records what it does to them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations()
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # kept: ids come again

    def ref(self, tensor: Tensor) -> StorageView | None:
        """Which recorded memory this tensor is a view of; None: it has values of its own."""
        if tensor.device.type != "meta":
            return None
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            raise NotDeferrable("it makes a tensor on the meta device")
        if tensor.is_conj() or tensor.is_neg():
            raise NotDeferrable("it has a lazily conjugated tensor")
        return StorageView(
            self._storages[storage._cdata][0],
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def nbytes(self, ref: StorageView) -> int:
        return self.operations.nbytes[ref.storage]

    def make(self, tensor: Tensor) -> Tensor:
        """The values that a tensor has now."""
        ref = self.ref(tensor)
        return tensor if ref is None else self.operations.make([ref])[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        deferred = [t for t in tensors if t.device.type == "meta"]
        if not deferred and not self._is_factory(func, tensors, kwargs):
            return func(*args, **kwargs)
        _check_device(kwargs)
        if func in SETS and len(deferred) == len(tensors):
            return func(*args, **kwargs)
        if func._opname in RESIZES:
            raise NotDeferrable(f"it calls {func._opname}")
        written = _written(func, args, kwargs)
        if not written and not any("Tensor" in str(r.type) for r in func._schema.returns):
            return self._now(func, args, kwargs)  # a number: it depends on values
        if any(t.device.type != "meta" for t in written):
            return self._now(func, args, kwargs)
        return self._record(func, args, kwargs, written)

    def _is_factory(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether it makes a tensor out of none."""
        names = {a.name for a in func._schema.arguments}
        makes = "device" in names and "Tensor" in str(func._schema.returns[0].type)
        if makes and kwargs.get("layout") not in (None, torch.strided):
            raise NotDeferrable("it makes a sparse tensor")
        return makes and not tensors

    def _now(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operation on values."""
        args, kwargs = tree_map(
            lambda v: self.make(v) if isinstance(v, Tensor) else v, (args, kwargs)
        )
        return func(*args, **kwargs)

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor]) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        state = self._draw(func, args, kwargs, written) if draws else None
        flat, spec = tree_flatten((args, kwargs))
        refs = [self._argument(v) for v in flat]
        reads = tuple(r for r in refs if isinstance(r, StorageView))
        on_meta = [_on_meta(v) for v in flat]
        meta_args, meta_kwargs = tree_unflatten(on_meta, spec)
        if _takes_device(func):
            meta_kwargs = {**meta_kwargs, "device": META, "pin_memory": None}
            names = {a.name for a in func._schema.arguments}
            meta_kwargs = {k: v for k, v in meta_kwargs.items() if k in names}
        try:
            got = func(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):
            if written or draws:
                raise NotDeferrable(f"{func.name()} needs values") from None
            return self._now(func, args, kwargs)  # shapes that depend on values
        outputs = tuple(self._output(v) for v in tree_leaves(got))
        if not written and not any(outputs):
            return got  # a view
        new_args, new_kwargs = tree_unflatten(refs, spec)
        if "device" in new_kwargs:
            new_kwargs = {**new_kwargs, "device": CPU}
        makes = {r.storage for r in outputs if r is not None}
        changed = {r.storage for r in map(self.ref, written) if r is not None}
        whole = changed if func in OVERWRITES else set()
        whole = {s for s in whole if any(_covers(t, self.ref(t), self.operations) for t in written)}
        read_too = [r.storage for r in reads].count
        whole = {s for s in whole if read_too(s) == 1}  # not copied from itself
        self.operations.add(
            Operation(
                func,
                new_args,
                new_kwargs,
                reads,
                outputs,
                frozenset(whole | makes),
                torch.get_default_dtype(),
                state,
            ),
            changed | makes,
        )
        return got

    def _draw(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Tensor:
        """Draw as a plain build does. Returns the generator's state before."""
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Generator)]
        state = (given[0] if given else torch.default_generator).get_state()
        if func in OVERWRITES and written:
            scratch = {id(t): _scratch(t) for t in written}
            args, kwargs = tree_map(lambda v: scratch.get(id(v), v), (args, kwargs))
        self._now(func, args, kwargs)
        return state

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            if value.device != CPU:
                raise NotDeferrable("it draws on another device")
            return DrawsFrom()
        if not isinstance(value, Tensor):
            return value
        if value.layout != torch.strided or value.is_quantized:
            raise NotDeferrable("it has a sparse or quantized tensor")
        ref = self.ref(value)
        return Constant(value.detach().clone()) if ref is None else ref

    def _output(self, value: Any) -> StorageView | None:
        """What an operation has made; None: a view of what was there."""
        if not isinstance(value, Tensor):
            return None
        if value.layout != torch.strided or value.device.type != "meta":
            raise NotDeferrable(f"it makes a tensor on {value.device}")
        storage = value.untyped_storage()
        if storage._cdata in self._storages:
            return None
        number = self.operations.new_storage(storage.nbytes())
        self._storages[storage._cdata] = number, storage
        return self.ref(value)


def _scratch(tensor: Tensor) -> Tensor:
    """Memory in the layout of `tensor`, without its values."""
    last = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    numel = 1 + last if tensor.numel() else 0
    return untouched(numel, tensor.dtype).as_strided(tensor.size(), tensor.stride())


def _takes_device(func: Any) -> bool:
    return any(a.name == "device" for a in func._schema.arguments)


def _check_device(kwargs: dict[str, Any]) -> None:
    device = kwargs.get("device")
    # torch's own code has seen tensors on the meta device; the model's code cannot (`PlainTensors`)
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise NotDeferrable(f"it uses device {device}")


def _on_meta(value: Any) -> Any:
    """The argument without values."""
    if isinstance(value, torch.Generator):
        return None
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the operation changes."""
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return [v for v in found if isinstance(v, Tensor)]


def _covers(tensor: Tensor, ref: StorageView | None, operations: Operations) -> bool:
    """Whether a view is the whole of its storage."""
    if ref is None or tensor.numel() * tensor.element_size() != operations.nbytes[ref.storage]:
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


class PlainTensors(TorchFunctionMode):
    """Answers what code asks of tensors without memory as if they were on the CPU."""

    def __init__(self, recording: BuildRecorder):
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and torch.device(kwargs["device"] or CPU).type == "meta":
            raise NotDeferrable("it makes a tensor on the meta device")
        if func is Tensor.__deepcopy__ and args[0].device.type != "meta":
            with _disable_current_modes():  # it works on storages
                return func(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].device.type == "meta":
            if func is _DEVICE:
                return CPU
            if func in _FALSE:
                return False
            if func in _TRUE:
                return True
            if func in _READS:
                return func(self._recording.make(args[0].detach()), *args[1:], **kwargs)
            if func in _ADDRESSES:
                raise NotDeferrable(f"it asks for {getattr(func, '__name__', func)} of a tensor")
            if func is Tensor.cpu:
                return args[0]
            if func is Tensor.to:  # a tensor is there already
                args, kwargs = _to(args, kwargs)
        return func(*args, **kwargs)


def _to(args: Any, kwargs: Any) -> tuple[Any, Any]:
    def stays(value: Any) -> Any:
        if isinstance(value, str | torch.device):
            if torch.device(value).type != "cpu":
                raise NotDeferrable(f"it moves a tensor to {value}")
            return META
        return value

    return (args[0], *map(stays, args[1:])), {k: stays(v) for k, v in kwargs.items()}


_any: Any = Tensor
_DEVICE = _any.device.__get__
_FALSE = (_any.is_meta.__get__, _any.is_cuda.__get__)
_TRUE = (_any.is_cpu.__get__,)
_READS = (_any.tolist, _any.__repr__, _any.__format__)
_ADDRESSES = (
    _any.numpy,
    _any.__array__,
    _any.data_ptr,
    _any.untyped_storage,
    _any.storage,
    _any.cuda,
    _any.share_memory_,
    _any.__reduce_ex__,
)
