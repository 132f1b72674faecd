"""Untouched memory: addresses to which the kernel gives memory at the first write.

It takes the memory back as soon as no tensor refers to it, whatever malloc keeps.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from manyhands.errors import TaskError

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)


def untouched(numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Zeros that take no memory until they are written."""
    nbytes = max(1, numel * dtype.itemsize)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except (OSError, ValueError) as e:
        raise TaskError(
            f"{nbytes:,} bytes of addresses for the model's parameters cannot be had ({e}); raise "
            "ulimit -v"
        ) from e
    return torch.frombuffer(pages, dtype=dtype, count=numel) if numel else torch.empty(0).to(dtype)
