"""Undispatched calls: autograd functions, TorchScript and compiled code get no sharded values.

torch's functions dispatch on their arguments; these calls do not. A custom autograd function would
run on a sharded value, but autograd would not see its slice, and what it returns would have no
gradient. So its `apply`, and the call of a scripted function, are wrapped, once in a process that
cuts a model: sharded values are gathered first, which is right, only slower. torch.compile leaves
out the lines that touch sharded values and compiles the others.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from manyhands.errors import TaskError
from manyhands.parallel.tensor.sharded_value import ShardedValue

PACKAGE = __name__.partition(".")[0]
Function: Any = torch.autograd.Function
SCRIPTED: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_skipped: list[str] = []  # packages that torch.compile does not trace


def gather_in_undispatched_calls() -> None:
    """Have such calls of this process gather sharded values first; idempotent."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and loading it takes seconds
        skip_in_compilation()
    if hasattr(Function.apply, "before"):
        return
    before = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(v, ShardedValue) for v in (*args, *kwargs.values())):
            args, kwargs = _whole(f"{cls.__name__}.apply", args, kwargs)
        out = before.__get__(None, cls)(*args, **kwargs)
        for v in out if isinstance(out, tuple) else (out,):
            if isinstance(v, ShardedValue):
                _refuse(cls, v)
        return out

    apply.before = before  # type: ignore[attr-defined]
    Function.apply = classmethod(apply)
    for cls in SCRIPTED:
        _wrap_scripted(cls)


def skip_in_compilation() -> None:
    """Have torch.compile run the code of this package as it is: it cannot trace an exchange."""
    if not _skipped:
        importlib.import_module("torch._dynamo.trace_rules").add(PACKAGE)
        _skipped.append(PACKAGE)


def _wrap_scripted(cls: Any) -> None:
    before = cls.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(v, ShardedValue) for v in (*args, *kwargs.values())):
            args, kwargs = _whole(self.name, args, kwargs)
        return before(self, *args, **kwargs)

    cls.__call__ = call


def _whole(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def full(value: Any) -> Any:
        if not isinstance(value, ShardedValue):
            return value
        value.axis.enters_call(name)
        return value.gather_for(name)

    return tuple(map(full, args)), {k: full(v) for k, v in kwargs.items()}


def _refuse(cls: Any, value: ShardedValue) -> None:
    raise TaskError(
        f"{cls.__name__}.apply returns {value!r}{value.axis.where()}, and autograd cannot see the "
        "slices of it; use checkpoint(..., use_reentrant=False) where it is a recomputation, or "
        f"{value.axis.remedy()}"
    )
