"""State exchange: tensors of every rank to all ranks, as one vector of numbers a rank.

    vector = [words of the header | for each list: length, for each tensor: dtype, shape | values]

No pickle: a vector holds numbers, and its reader knows which states it is of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.core import Group
from manyhands.errors import TaskError

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
WORD = 8  # bytes


def pack(lists: Sequence[Sequence[Tensor]]) -> Tensor:
    """Lists of tensors as one vector of int64, to the bit."""
    header: list[int] = []
    values: list[Tensor] = []
    for tensors in lists:
        header.append(len(tensors))
        for t in tensors:
            if t.dtype not in DTYPES:
                raise TaskError(f"a metric holds a tensor of {t.dtype}, which ranks do not send")
            header += [DTYPES.index(t.dtype), t.ndim, *t.shape]
            # copied, as a slice of one element keeps a stride that no view in bytes accepts
            flat = torch.empty(t.numel(), dtype=t.dtype).copy_(t.detach().reshape(-1))
            raw = flat.view(torch.uint8)
            values.append(torch.nn.functional.pad(raw, (0, -raw.numel() % WORD)))
    start = torch.tensor([len(header), *header], dtype=torch.int64)
    return torch.cat([start, *(v.view(torch.int64) for v in values)])


def unpack(vector: Tensor) -> list[list[Tensor]]:
    """The lists of tensors that `pack` was given."""
    length = int(vector[0])
    header, at = vector[1 : 1 + length].tolist(), 1 + length
    found: list[list[Tensor]] = []
    words = iter(header)
    for count in words:
        found.append([])
        for _ in range(count):
            dtype, ndim = DTYPES[next(words)], next(words)
            shape = [next(words) for _ in range(ndim)]
            nbytes = dtype.itemsize
            for n in shape:
                nbytes *= n
            end = at + -(-nbytes // WORD)
            raw = vector[at:end].view(torch.uint8)[:nbytes]
            found[-1].append(raw.view(dtype).reshape(shape).clone())
            at = end
    return found


def all_gather_vectors(mine: Tensor, group: Group, device: torch.device) -> list[Tensor]:
    """The vectors of int64 of all ranks, in their order; ranks may give vectors of any lengths,
    also of none. By calls that a group makes whose members come and go, too."""
    where = device if device.type == "cuda" else torch.device("cpu")
    lengths = torch.zeros(group.size, dtype=torch.int64, device=where)
    lengths[group.rank] = mine.numel()
    group.all_reduce({"lengths": lengths}).wait()
    found = []
    for rank, length in enumerate(lengths.tolist()):
        vector = mine if rank == group.rank else torch.zeros(length, dtype=torch.int64)
        if length and group.size > 1:
            sent = vector.to(where, copy=True)
            group.broadcast({"metrics": sent}, rank).wait()
            vector = sent.cpu()
        found.append(vector)
    return found
