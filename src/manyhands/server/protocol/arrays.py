"""Named arrays in a payload: the content of a table as one message and raw numbers."""

from __future__ import annotations

import numpy as np

from manyhands.server.protocol.frame import Cursor, Malformed, aligned
from manyhands.server.protocol.messages import ArraySpec

DTYPES = ("<f4", "<f8", "<i8", "<i4", "<u8", "<u2", "|u1")


def pack(arrays: dict[str, np.ndarray]) -> tuple[list[ArraySpec], list[np.ndarray]]:
    """Specs for the message, and the contiguous arrays of the payload."""
    whole = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    specs = [ArraySpec(name, x.dtype.str, list(x.shape)) for name, x in whole.items()]
    return specs, list(whole.values())


def unpack(specs: list[ArraySpec], memory: np.ndarray) -> dict[str, np.ndarray]:
    """Views of the payload by name."""
    cursor, found = Cursor(memory), {}
    for spec in specs:
        if spec.dtype not in DTYPES:
            raise Malformed("garbage", f"an array of {spec.dtype!r}")
        if any(n < 0 for n in spec.shape):
            raise Malformed("size", f"an array of shape {spec.shape}")
        count = int(np.prod(spec.shape, dtype=np.int64)) if spec.shape else 1
        found[spec.name] = cursor.take(count, np.dtype(spec.dtype)).reshape(spec.shape)
    return found


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """The payload that these parts make, in one piece."""
    if len(parts) == 1 and parts[0].dtype == np.uint8:
        return parts[0]
    memory = np.zeros(sum(aligned(part.nbytes) for part in parts), np.uint8)
    at = 0
    for part in parts:
        memory[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)
        at += aligned(part.nbytes)
    return memory
