"""Message format between stages: the values of a micro-batch as one buffer of bytes.

    forward     header | tensor | tensor ...
    backward    header | gradient ...

The forward header is 0 where the receiver knows the format. Else it is n: a message of n bytes
describes the format, and the tensors follow in a third message. The backward header has a byte a
gradient, 1 where there is one; a value that needs no gradient is not in the message.

Nothing is pickled: a format is JSON, tensors are raw bytes. Every tensor begins at a multiple of 64
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from manyhands.errors import TaskError
from manyhands.parallel.tensor.sharding_rules import ShardedValue, TensorAxis

HEADER_BYTES = 64  # every tensor begins at a multiple of it
PLAIN = (type(None), bool, int, float, str)
Values = dict[str, Any]


class TensorMeta(NamedTuple):
    """Shape and type of one tensor in a message, and whether a gradient is to come back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = True

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class MessageFormat:
    """The layout of a message. `tree`: the values, with an index into `metas` for every tensor."""

    text: str
    tree: Any
    metas: tuple[TensorMeta, ...]

    @classmethod
    def parse(cls, text: str) -> MessageFormat:
        tree, rows = json.loads(text)
        metas = (
            TensorMeta(tuple(shape), getattr(torch, dtype), bool(grad))
            for shape, dtype, grad in rows
        )
        return cls(text, tree, tuple(metas))

    @classmethod
    def of(cls, tree: Any, tensors: Sequence[Tensor]) -> MessageFormat:
        metas = tuple(TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        rows = [(m.shape, str(m.dtype).removeprefix("torch."), m.grad) for m in metas]
        return cls(json.dumps([tree, rows]), tree, metas)


@dataclass
class ReceivedValues:
    """Values as they were sent. `tensors`: those among them, and for each whether a gradient is to
    go back."""

    tree: Any
    tensors: list[Tensor]
    wanted: list[bool]
    axis: TensorAxis | None

    def values(self, tensors: Sequence[Tensor]) -> Values:
        """The values with `tensors` in place of the received ones."""
        return cast(Values, decode(self.tree, tensors, self.axis))


# -- bytes --


def message_bytes(metas: Sequence[TensorMeta], header: int = 1) -> int:
    return _aligned(header) + sum(_aligned(m.nbytes) for m in metas)


def tensor_views(message: Tensor, metas: Sequence[TensorMeta], header: int = 1) -> Iterator[Tensor]:
    """The tensors of a message, as views of its memory."""
    start = _aligned(header)
    for m in metas:
        yield message[start : start + m.nbytes].view(m.dtype).view(m.shape)
        start += _aligned(m.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // HEADER_BYTES) * HEADER_BYTES


# -- values of any kind, as plain JSON --


def encode(value: Any, tensors: list[Tensor], stage: int) -> Any:
    """`value` as JSON; appends its tensors to `tensors`. `stage`: the receiver, for the error
    message."""
    if isinstance(value, ShardedValue):
        # the slice goes to the rank of the next stage that holds the same slice
        how = (value.local, value.shard_dim, value.length, value.groups, value.lead)
        return {"sharded": [encode(v, tensors, stage) for v in how]}
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TaskError(
                f"a {value.layout} tensor goes to stage {stage}; only dense tensors can be sent: "
                "cut the model elsewhere (cut=)"
            )
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return {"slice": [encode(v, tensors, stage) for v in bounds]}
    if type(value) in (list, tuple, torch.Size):
        return {type(value).__name__: [encode(v, tensors, stage) for v in value]}
    if type(value) is dict:
        pairs = value.items()
        return {"dict": [[encode(k, tensors, stage), encode(v, tensors, stage)] for k, v in pairs]}
    raise TaskError(
        f"a {type(value).__name__} goes to stage {stage}; tensors, numbers, strings, and lists, "
        "tuples and dicts of them can be sent: cut the model elsewhere (cut=)"
    )


def decode(tree: Any, tensors: Sequence[Tensor], axis: TensorAxis | None) -> Any:
    """The value that `encode` was given."""
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "dict":
        return {decode(k, tensors, axis): decode(v, tensors, axis) for k, v in inner}
    items = [decode(v, tensors, axis) for v in inner]
    if kind == "sharded":
        assert axis is not None, "a pipeline whose tensors are sharded is given their axis"
        local, along, length, groups, lead = items
        sharded = ShardedValue(local, along, length, axis, groups)
        sharded.lead = lead
        return sharded
    if kind == "list":
        return items
    if kind == "slice":
        return slice(*items)
    return tuple(items) if kind == "tuple" else torch.Size(items)
