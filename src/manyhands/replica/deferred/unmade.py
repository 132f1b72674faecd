"""Unmade parameters: they have shapes, dtypes and addresses, but no values and no memory yet.

    deferred(build)      a model whose parameters are unmade; or a plain one, and why
    value_of(p)          the whole value of a parameter, in new memory where it is unmade
    place(p, value)      the parameter's memory from now on
    make_parameters(m)   the values of all that are still unmade, one after the other

An unmade parameter lies in pages that no process has written: the kernel gives them memory at the
first write only. So code that looks at shapes, strides and devices needs to know nothing of it.
Buffers, and tensors that the model keeps in other places, are made at once.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhands.replica.deferred.build_recorder import BuildRecorder, NotDeferrable, PlainTensors
from manyhands.replica.deferred.operations import Operations, StorageView
from manyhands.replica.deferred.untouched_memory import untouched

_c: Any = torch._C
UNMADE = "_manyhands_unmade"  # attribute of a parameter


@dataclass(frozen=True)
class Recorded:
    """A parameter's value as the model function made it."""

    operations: Operations
    ref: StorageView

    def __call__(self) -> Tensor:
        return self.operations.make([self.ref])[0]


def deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
    """The model with unmade parameters, and ""; or the model as it is, and why. Random numbers are
    drawn as in a plain build either way."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    recording = BuildRecorder()
    try:
        with recording, PlainTensors(recording):
            model = build()
        _replace_recorded(model, recording)
        return model, ""
    except Exception as e:  # of the task's own, too: the plain build raises it again
        said = str(e).splitlines()
        named = "" if isinstance(e, NotDeferrable) else f"{type(e).__name__}: "
        why = named + (said[0] if said else "")
    del recording
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    return build(), why


def value_of(tensor: Tensor) -> Tensor:
    """The whole value of a parameter or buffer: its memory; where it is unmade, new memory."""
    make: Callable[[], Tensor] | None = getattr(tensor, UNMADE, None)
    if make is None:
        return tensor.data
    # what was read from a file or a state dict stays as it is
    return make().detach().to(tensor.dtype, copy=not isinstance(make, Recorded))


def is_unmade(tensor: Tensor) -> bool:
    return hasattr(tensor, UNMADE)


def place(parameter: Tensor, memory: Tensor) -> None:
    """Let the parameter lie in `memory`, which has its value or a slice of it."""
    parameter.data = memory
    if is_unmade(parameter):
        delattr(parameter, UNMADE)


def unmade_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if is_unmade(p)]


def load(tensor: Tensor, read: Callable[[], Tensor]) -> None:
    """Another value for a parameter or buffer; of an unmade one it is read when it is made."""
    if is_unmade(tensor):
        setattr(tensor, UNMADE, read)
    else:
        with torch.no_grad():
            tensor.copy_(read())


def make_parameters(parameters: Iterable[Tensor]) -> None:
    for p in parameters:
        if is_unmade(p):
            place(p, value_of(p))


def digest(module: nn.Module) -> list[int]:
    """Four numbers, equal where two processes make the same values by the same operations."""
    makers = [getattr(p, UNMADE) for p in unmade_parameters(module)]
    found = [make.operations for make in makers if isinstance(make, Recorded)]
    return found[0].digest() if found else [0] * 4


def is_loaded(parameter: Tensor) -> bool:
    """Whether it is unmade, and its value comes from elsewhere than the model function."""
    return is_unmade(parameter) and not isinstance(getattr(parameter, UNMADE), Recorded)


class MadeOnRead(TorchDispatchMode):
    """Makes unmade parameters when code reads them, where they are: the user's own code may keep
    views of them."""

    def __init__(self, parameters: Iterable[Tensor]):
        super().__init__()
        self._unmade = {p.untyped_storage()._cdata: p for p in parameters if is_unmade(p)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._opname.endswith("_like"):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.layout == torch.strided:
                    self._make(value)
        return func(*args, **(kwargs or {}))

    def _make(self, tensor: Tensor) -> None:
        found = self._unmade.pop(tensor.untyped_storage()._cdata, None)
        if found is not None and is_unmade(found):
            found.data.copy_(value_of(found))
            place(found, found.data)


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`module.to(dtype)` of floating-point values; of unmade parameters when they are made."""
    for p in unmade_parameters(module):
        if p.is_floating_point():
            memory = untouched(p.numel(), dtype)
            dense = torch.ops.aten.is_non_overlapping_and_dense.default(p)
            p.data = memory.as_strided(p.shape, p.stride()) if dense else memory.view(p.shape)
    return module.to(dtype)


def _replace_recorded(model: nn.Module, recording: BuildRecorder) -> None:
    """Put CPU tensors in the place of those that the recording gave out."""
    if not isinstance(model, nn.Module):
        raise NotDeferrable("it makes no module")
    gc.collect()
    if any(nn.parameter.is_lazy(v) for v in (*model.parameters(), *model.buffers())):
        raise NotDeferrable("it has lazy parameters")
    parameters = {id(p): p for p in model.parameters()}
    found = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    given = [t for t in found if t.device.type == "meta" and recording.knows(t)]
    known = {id(t) for t in given}
    given += [
        p
        for p in (*model.parameters(), *model.buffers())
        if id(p) not in known and p.device.type == "meta"
    ]
    del found
    refs = {id(t): recording.ref(t) for t in given}
    others = [t for t in given if id(t) not in parameters or type(t) is not nn.Parameter]
    at_once = {ref.storage for t in others if (ref := refs[id(t)]) is not None}
    _check_grads(given)
    storages: dict[int, torch.UntypedStorage] = {}
    for t in given:
        ref = refs[id(t)]
        assert ref is not None
        if ref.storage not in storages:
            whole = StorageView(ref.storage, torch.uint8, (recording.nbytes(ref),), (1,), 0)
            storages[ref.storage] = (
                recording.operations.make([whole])[0]
                if ref.storage in at_once
                else untouched(recording.nbytes(ref), torch.uint8)
            ).untyped_storage()
        value = ref.of(storages[ref.storage])
        own: Any = nn.Parameter(value, t.requires_grad) if isinstance(t, nn.Parameter) else value
        # not torch.utils.swap_tensors: it refuses what a model has weak references to (LSTM)
        _c._swap_tensor_impl(t, own.requires_grad_(t.requires_grad))
        if ref.storage not in at_once:
            setattr(t, UNMADE, Recorded(recording.operations, ref))


def _check_grads(given: list[Tensor]) -> None:
    if any(t.grad_fn is not None or t.grad is not None for t in given):
        raise NotDeferrable("it keeps a tensor that was computed with gradients")
