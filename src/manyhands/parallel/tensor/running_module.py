"""Running module: the name of the innermost module whose forward runs, for error messages.

It is looked up on the call stack when an error is made, so a forward pass pays nothing for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from weakref import WeakKeyDictionary

from torch import nn

ModuleNames = WeakKeyDictionary[nn.Module, str]


def named(module: nn.Module) -> ModuleNames:
    """The names of all modules in `module` that have parameters, as Task(tensor=...) takes them."""
    return WeakKeyDictionary(
        {m: n for n, m in module.named_modules() if n and next(m.parameters(), None) is not None}
    )


def running_module(names: ModuleNames) -> str | None:
    """The innermost named module on the stack of this call."""
    return innermost(names, _stack(sys._getframe(1)))


def innermost(names: ModuleNames, frames: Iterable[FrameType]) -> str | None:
    """The first module that a method runs for; `frames` begin with the innermost."""
    for frame in frames:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and (name := names.get(owner)) is not None:
            return name
    return None


def frames_of(traceback: TracebackType | None) -> list[FrameType]:
    """The frames of an exception, the innermost first."""
    found = []
    while traceback is not None:
        found.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return found[::-1]


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
