"""Isolation of a traced forward pass: the model and torch's settings are restored afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

_ONE_AT_A_TIME = Lock()


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore all attributes of all modules: no cache may keep a tensor without values."""
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
            # a decoder in training has no use for keys and values of earlier tokens
            config.use_cache = False
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
    """Let transformers skip attention masks that the sizes of the batch make unnecessary.

    It builds every mask while it is being traced, since a tracer usually cannot answer whether the
    mask is needed. Ours can, for tensors that depend on sizes alone (`by_sizes`)."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    is_tracing = getattr(masks, "is_tracing", None)
    if is_tracing is None:
        yield
        return
    with _ONE_AT_A_TIME:
        masks.is_tracing = lambda tensor=None: (
            not (tensor is not None and by_sizes(tensor)) and is_tracing(tensor)
        )
        try:
            yield
        finally:
            masks.is_tracing = is_tracing


@contextmanager
def one_convolution_backend() -> Iterator[None]:
    """Switch off mkldnn and nnpack.

    torch chooses a convolution library by the size of the batch. That guard is torch's own and must
    not be taken for one of the model's."""
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
    """The module with its real parameters and buffers, by the id of the fake tensor of each.

    Buffers have their old values afterwards."""
    buffers = [(b, b.clone()) for b in (real[id(b)] for b in module.buffers())]
    owns = [own for m in module.modules() for own in (m._parameters, m._buffers)]
    fakes = [dict(own) for own in owns]
    try:
        for own in owns:
            found: Any = {name: real[id(t)] for name, t in own.items() if t is not None}
            own.update(found)
        yield
    finally:
        for own, fake in zip(owns, fakes, strict=True):
            own.update(fake)  # type: ignore[arg-type]
        for buffer, value in buffers:
            buffer.copy_(value)
