"""Sharded file: one safetensors file, written by many ranks at once, each its own shards.

    rank 0       creates a hidden file of the final length, with the header
    all ranks    open it, write their shards at their offsets, sync
    rank 0       renames it

No rank holds more than its own shards. All ranks must see one disk. An error on one of them is
raised on all, and leaves no file behind.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from torch import Tensor

from manyhands.core import Group
from manyhands.errors import CheckpointError
from manyhands.split.shard_slice import AnyShardSpec, ShardSlice, runs

CPU = torch.device("cpu")
# in the format's order: a file holds tensors of later ones first, so that they are aligned
KINDS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
TEXT = 400  # bytes of an error message that all ranks get
Shapes = Mapping[str, tuple[torch.dtype, Sequence[int]]]


class TensorShard(Protocol):
    """A rank's shard of a global tensor: which slice, and its values."""

    @property
    def spec(self) -> AnyShardSpec: ...
    @property
    def tensor(self) -> Tensor: ...


@dataclass(frozen=True)
class FileLayout:
    """Layout of a safetensors file: its header, and the offset of each tensor."""

    header: bytes
    offsets: dict[str, int]
    nbytes: int


def file_layout(tensors: Shapes, metadata: Mapping[str, str] | None = None) -> FileLayout:
    """The layout that `safetensors` itself would choose: a file written in shards has the same
    bytes as one written at once."""
    order = list(KINDS)
    names = sorted(
        tensors, key=lambda name: (-_index(order, name, tensors[name][0]), name.encode())
    )
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, at = {}, 0
    for name in names:
        dtype, shape = tensors[name]
        length = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": KINDS[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + length],
        }
        starts[name] = at
        at += length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    return FileLayout(
        raw, {name: len(raw) + start for name, start in starts.items()}, len(raw) + at
    )


def _index(order: list[torch.dtype], name: str, dtype: torch.dtype) -> int:
    if dtype not in KINDS:
        raise CheckpointError(f"{name} is {dtype}, which a safetensors file cannot hold")
    return order.index(dtype)


# -- writing --


def write(
    path: Path,
    tensors: Shapes,
    mine: Iterable[TensorShard],
    group: Group,
    metadata: Mapping[str, str] | None = None,
    device: torch.device = CPU,
) -> int:
    """Write one file together; returns its bytes.

    Every rank calls it with the same `tensors` and its own shards of them, which together must make
    all of them. On every rank alike, the file is at `path` when this returns, or nowhere when it
    raises. `device` is where the group takes tensors from.
    """
    layout = file_layout(tensors, metadata)
    hidden = path.with_name(f".{path.name}-{_token(group, device):016x}")
    try:
        _on_all_ranks(group, device, lambda: _create(hidden, layout) if group.rank == 0 else None)
        _on_all_ranks(group, device, lambda: _fill(hidden, layout, mine))
        _on_all_ranks(group, device, lambda: _name(hidden, path) if group.rank == 0 else None)
    except BaseException:
        if group.rank == 0:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
        raise
    return layout.nbytes


def _token(group: Group, device: torch.device) -> int:
    """A random number of rank 0, for a file name that cannot exist yet."""
    token = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=device)
    group.broadcast({"token": token}).wait()
    return int(token)


def _create(file: Path, layout: FileLayout) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as f:
        f.write(layout.header)
        f.truncate(layout.nbytes)


def _fill(file: Path, layout: FileLayout, mine: Iterable[TensorShard]) -> None:
    try:
        fd = os.open(file, os.O_WRONLY)
    except FileNotFoundError:
        raise CheckpointError(
            f"does not see {file}, which rank 0 has just made; "
            "all ranks must see the same directory: put it on a shared disk"
        ) from None
    try:
        for shard in mine:
            write_shard(fd, layout, shard.spec, shard.tensor)
        os.fsync(fd)
    finally:
        os.close(fd)


def _name(hidden: Path, path: Path) -> None:
    os.replace(hidden, path)
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_shard(fd: int, layout: FileLayout, spec: AnyShardSpec, tensor: Tensor) -> None:
    """Write one shard at its offsets in the file.

    By positioned writes: a mapped file is written in whole pages, and on a network file system the
    pages of one rank would overwrite its neighbours' data.
    """
    raw = _bytes(tensor).numpy().data
    width, start, at = tensor.element_size(), layout.offsets[spec.name], 0
    if tuple(tensor.shape) != spec.local_shape:
        raise CheckpointError(
            f"{spec.name}: a tensor of shape {tuple(tensor.shape)} for a slice of "
            f"{spec.local_shape}"
        )
    for first, length in runs(spec):
        offset, stop = start + first * width, at + length * width
        while at < stop:
            done = os.pwrite(fd, raw[at:stop], offset)
            at, offset = at + done, offset + done


def _bytes(tensor: Tensor) -> Tensor:
    flat: Any = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8)


# -- errors on all ranks --


def _on_all_ranks(group: Group, device: torch.device, work: Callable[[], None]) -> None:
    """Do `work` on this rank; return when all ranks have, or raise if one of them had an error."""
    wrong = ""
    try:
        work()
    except (OSError, CheckpointError) as e:
        wrong = str(e)
    agree(group, wrong, device)


def agree(group: Group, wrong: str, device: torch.device = CPU) -> None:
    """Raise CheckpointError on all ranks if one of them gives an error message; "": no error."""
    if said := shared_error(group, wrong, device):
        raise CheckpointError(said)


def shared_error(group: Group, wrong: str, device: torch.device = CPU) -> str:
    """The error message of the first rank that gives one, on all ranks; "": none does."""
    failed = torch.zeros(group.size, dtype=torch.int64, device=device)
    failed[group.rank] = int(bool(wrong))
    group.all_reduce({"failed": failed}).wait()
    ranks = failed.nonzero().view(-1).tolist()
    if not ranks:
        return ""
    text = torch.zeros(TEXT, dtype=torch.int64, device=device)
    if group.rank == ranks[0]:
        raw = wrong.encode()[:TEXT]
        text[: len(raw)] = torch.tensor(list(raw), dtype=torch.int64)
    group.broadcast({"text": text}, source=ranks[0]).wait()
    said = bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")
    others = f" (and {len(ranks) - 1} more ranks)" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{others}: {said}" if group.size > 1 else said


def check_common(folder: Path, group: Group, device: torch.device = CPU) -> None:
    """Check that rank 0 can write in `folder` and that all ranks see it. Every rank calls it."""
    token = _token(group, device)
    mark = folder / f".seen-{token:016x}"
    try:
        _on_all_ranks(
            group,
            device,
            lambda: _create(mark, FileLayout(b"", {}, 0)) if group.rank == 0 else None,
        )
        _on_all_ranks(group, device, lambda: _fill(mark, FileLayout(b"", {}, 0), ()))
    finally:
        if group.rank == 0:
            mark.unlink(missing_ok=True)


# -- reading --


class Reader:
    """Reader of a safetensors file: reads only the slices that are asked for."""

    def __init__(self, file: Path):
        self.file = file
        try:
            self._open = safetensors.safe_open(file, framework="pt")
            self._open.__enter__()
        except (OSError, safetensors.SafetensorError) as e:
            raise CheckpointError(f"{file} cannot be read ({e})") from e
        self.names: list[str] = list(self._open.keys())

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.__exit__(None, None, None)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._open.get_slice(name).get_dtype()]

    def whole(self, name: str) -> Tensor:
        found: Tensor = self._open.get_tensor(name)
        return found

    def read(self, name: str, spec: AnyShardSpec) -> Tensor:
        """The slice `spec` of the tensor `name`, whatever the name in `spec` is."""
        if self.shape(name) != spec.shape:
            raise CheckpointError(
                f"{name} has shape {self.shape(name)} in {self.file}, not {spec.shape}"
            )
        part = spec.spec if isinstance(spec, ShardSlice) else spec
        if isinstance(spec, ShardSlice) and part.dim is None and part.shape:
            row = math.prod(part.shape[1:])  # only the rows that the slice touches
            first, last = (spec.start // row, -(-spec.stop // row)) if row else (0, 0)
            rows = self._open.get_slice(name)[first : max(first, last)].reshape(-1)
            taken: Tensor = rows[spec.start - first * row : spec.stop - first * row].clone()
            return taken
        if part.dim is None:
            held = self.whole(name)
        else:
            ahead = (slice(None),) * part.dim
            held = torch.cat(
                [self._open.get_slice(name)[(*ahead, slice(*r))] for r in part.ranges], part.dim
            )
        return (
            held.reshape(-1)[spec.start : spec.stop].clone()
            if isinstance(spec, ShardSlice)
            else held
        )
