"""Tensors that differ between ranks: found by checksum, gathered on rank 0."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Tensors
from manyhands.replica import state


def all_rng(context: RankContext) -> Tensors:
    """Every rank's random number generators, as "<rank>/<generator>"."""
    mine, size = state.rng_state(context.device), context.process.size
    rows = {k: torch.zeros(size, v.numel(), dtype=torch.int32) for k, v in mine.items()}
    for k, v in mine.items():
        rows[k][context.rank] = v.to(torch.int32)
    if context.device.type == "cuda":
        rows = {k: v.to(context.device) for k, v in rows.items()}
    context.group.all_reduce(rows).wait()
    return {f"{r}/{k}": v[r].to("cpu", torch.uint8) for k, v in rows.items() for r in range(size)}


def differing(context: RankContext, mine: Tensors) -> list[str]:
    """Names of tensors that are not equal, to the bit, on all replicas."""
    if context.data_group.size == 1 or not mine:
        return []
    sums = []
    for value in mine.values():
        raw = _bytes(value).cpu().numpy().tobytes()
        sums.append(zlib.crc32(raw) << 31 | zlib.adler32(raw) >> 1)
    here = torch.tensor(sums, dtype=torch.int64, device=context.device)
    span = torch.cat([here, -here])
    context.data_group.all_reduce({"checksums": span}, op="max").wait()
    same = (span[: len(sums)] == -span[len(sums) :]).tolist()
    return [k for k, alike in zip(mine, same, strict=True) if not alike]


def gathered(context: RankContext, mine: Tensors) -> Tensors:
    """On rank 0 every rank's tensors, under "<rank>/<name>"; nothing on the others. A vector may
    have another length on another rank."""
    if not mine:
        return {}
    size = context.process.size
    lengths = torch.zeros(size, len(mine), dtype=torch.int64, device=context.device)
    lengths[context.rank] = torch.tensor([v.numel() for v in mine.values()])
    context.group.all_reduce({"lengths": lengths}).wait()
    packed = torch.cat([_bytes(v) for v in mine.values()]).to(context.device)
    if context.rank != 0:
        context.group.transfer({0: packed}, {}).wait()
        return {}
    sizes = torch.tensor([v.element_size() for v in mine.values()])
    others = {
        r: torch.empty(int(lengths[r].cpu() @ sizes), dtype=torch.uint8, device=context.device)
        for r in range(1, size)
    }
    context.group.transfer({}, others).wait()
    found: Tensors = {}
    for rank, raw in {0: packed, **others}.items():
        at = 0
        for (name, value), length in zip(mine.items(), lengths[rank].tolist(), strict=True):
            # clone: a slice may start at any byte, a tensor may not
            own = raw[at : at + length * value.element_size()].cpu().clone()
            shape = value.shape if length == value.numel() else length
            found[f"{rank}/{name}"] = own.view(value.dtype).view(shape)
            at += own.numel()
    return found


def _bytes(value: Tensor) -> Tensor:
    flat: Any = value.detach().contiguous().view(-1)
    return flat.view(torch.uint8)
