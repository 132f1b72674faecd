"""Around a recorded forward pass: the model is left as it was, and errors name the line of the user's code."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_ONE_AT_A_TIME = Lock()


class Untraceable(Exception):
    """What the forward pass does at some line cannot be written down; `inside` is the path of the module whose code it is."""

    def __init__(self, message: str, inside: str = "", by_value: bool = False):
        super().__init__(message)
        self.inside, self.by_value = inside, by_value


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """All attributes of all modules again as they were: tensors without values must not stay behind in a cache."""
    before: list[Any] = [
        (m.__dict__, dict(m.__dict__), [(own, dict(own)) for own in (m._parameters, m._buffers)])
        for m in model.modules()
    ]
    configs: list[Any] = [
        c
        for m in model.modules()
        if getattr(c := getattr(m, "config", None), "use_cache", False) is True
    ]
    try:
        for config in configs:
            config.use_cache = (
                False  # a decoder in training has no use for keys and values of earlier tokens
            )
        yield
    finally:
        for config in configs:
            config.use_cache = True
        for attributes, values, owns in before:
            attributes.clear()
            attributes.update(values)
            for own, tensors in owns:
                own.clear()
                own.update(tensors)


@contextmanager
def masks_by_sizes(by_sizes: Callable[[Any], bool]) -> Iterator[None]:
    """transformers makes attention masks for tensors without values, where it asks others whether it needs any; ours it may ask."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    asked = getattr(masks, "is_tracing", None)
    if asked is None:
        yield
        return
    with _ONE_AT_A_TIME:
        masks.is_tracing = lambda tensor=None: (
            not (tensor is not None and by_sizes(tensor)) and asked(tensor)
        )
        try:
            yield
        finally:
            masks.is_tracing = asked


def is_ours(file: str) -> bool:
    return file.startswith(LIBRARIES) or "/sympy/" in file or file.endswith("contextlib.py")


def frames_of(frame: Any) -> Iterator[tuple[Any, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def place(frames: Sequence[tuple[Any, int]]) -> str:
    """file:line of the innermost code that is neither torch's nor ours, with what stands there."""
    for frame, number in frames:
        file = frame.f_code.co_filename
        if not is_ours(file):
            text = linecache.getline(file, number).strip()
            return f"{file}:{number}" + (f" (`{text}`)" if text else "")
    return "in the forward pass"


def line() -> str:
    for frame, number in frames_of(sys._getframe(1)):
        if not is_ours(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{number}"
    return ""


@contextmanager
def one_way_to_convolve() -> Iterator[None]:
    """Which library is to convolve, torch decides by how large a batch is: a question of its own, which must not be taken for one
    of the model's."""
    before = torch._C._get_mkldnn_enabled(), torch._C._get_nnpack_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_nnpack_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_nnpack_enabled(before[1])


@contextmanager
def real_state(module: nn.Module, real: dict[int, Tensor]) -> Iterator[None]:
    """The module with its parameters and buffers in place of what stands for them (by id); the buffers are as before afterwards."""
    buffers = [(b, b.clone()) for b in (real[id(b)] for b in module.buffers())]
    owns = [own for m in module.modules() for own in (m._parameters, m._buffers)]
    fakes = [dict(own) for own in owns]
    try:
        for own in owns:
            own.update({name: real[id(t)] for name, t in own.items() if t is not None})  # type: ignore[misc]
        yield
    finally:
        for own, fake in zip(owns, fakes, strict=True):
            own.update(fake)  # type: ignore[arg-type]
        for buffer, value in buffers:
            buffer.copy_(value)
