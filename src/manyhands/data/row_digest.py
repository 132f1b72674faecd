"""Row digest: equal where two ranks read the same rows of a stream."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (str, bytes, bool, int, float, complex, np.generic, type(None))


def row_digest(rows: list[Any]) -> str:
    """Of tensors, arrays, numbers, texts and images, however they are nested; of any other object
    its type alone, as its bytes need not be the same in two processes."""
    found = hashlib.sha256()
    _add(found, rows)
    return found.hexdigest()


def _add(found: hashlib._Hash, value: Any) -> None:
    found.update(f"{type(value).__name__}:".encode())
    if isinstance(value, PLAIN):
        found.update(repr(value).encode())
    elif isinstance(value, Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(_bytes(value))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(value.tobytes())
    elif isinstance(value, Mapping):
        _add(found, list(value.items()))
    elif isinstance(value, tuple | list | np.ndarray):
        found.update(f"{len(value)}".encode())
        for item in value:
            _add(found, item)
    elif dataclasses.is_dataclass(value):
        _add(found, [getattr(value, f.name) for f in dataclasses.fields(value)])
    elif callable(image := getattr(value, "tobytes", None)):
        found.update(image())


def _bytes(tensor: Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return b""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
