"""One safetensors file, written by many processes at once: each writes its regions of the tensors at their places in the file.

    rank 0:      header and length of a hidden file                                   nobody holds more than his own part
    all ranks:   see it? write my regions at their offsets, sync
    rank 0:      give it its name

All ranks must see one disk. What goes wrong on one of them is an error on all, and leaves nothing behind.
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
# the order in which the format lays tensors out: later ones first, so that large elements are aligned
KINDS = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32",
    torch.float32: "F32", torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
TEXT = 400  # bytes of an error that other ranks hear
Shapes = Mapping[str, tuple[torch.dtype, Sequence[int]]]


class TensorRegion(Protocol):
    """A region of a tensor and what stands there."""

    @property
    def spec(self) -> AnyShardSpec: ...
    @property
    def tensor(self) -> Tensor: ...


@dataclass(frozen=True)
class LaidOut:
    """Where in a file each tensor begins."""

    header: bytes
    offsets: dict[str, int]
    nbytes: int


def lay_out(tensors: Shapes, metadata: Mapping[str, str] | None = None) -> LaidOut:
    """As `safetensors` itself would, so that a file written in parts is the same to the byte as one written whole."""
    order = list(KINDS)
    names = sorted(
        tensors, key=lambda name: (-_place(order, name, tensors[name][0]), name.encode())
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
    return LaidOut(raw, {name: len(raw) + start for name, start in starts.items()}, len(raw) + at)


def _place(order: list[torch.dtype], name: str, dtype: torch.dtype) -> int:
    if dtype not in KINDS:
        raise CheckpointError(f"{name} is {dtype}, which a safetensors file cannot hold")
    return order.index(dtype)


# -- writing --


def write(
    path: Path,
    tensors: Shapes,
    mine: Iterable[TensorRegion],
    group: Group,
    metadata: Mapping[str, str] | None = None,
    device: torch.device = CPU,
) -> int:
    """Every rank calls it with the same `tensors`, and its own regions of them: together they must be all of them. Returns the
    bytes of the file, which is at `path` when this returns, or nowhere when it raises, on every rank alike. `device` is where
    the group's tensors live."""
    laid = lay_out(tensors, metadata)
    hidden = path.with_name(f".{path.name}-{_token(group, device):016x}")
    try:
        _together(group, device, lambda: _create(hidden, laid) if group.rank == 0 else None)
        _together(group, device, lambda: _fill(hidden, laid, mine))
        _together(group, device, lambda: _name(hidden, path) if group.rank == 0 else None)
    except BaseException:
        if group.rank == 0:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
        raise
    return laid.nbytes


def _token(group: Group, device: torch.device) -> int:
    """For a name that nobody can have made before: who sees it, sees the disk of rank 0."""
    token = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=device)
    group.broadcast({"token": token}).wait()
    return int(token)


def _create(file: Path, laid: LaidOut) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as f:
        f.write(laid.header)
        f.truncate(laid.nbytes)


def _fill(file: Path, laid: LaidOut, mine: Iterable[TensorRegion]) -> None:
    try:
        fd = os.open(file, os.O_WRONLY)
    except FileNotFoundError:
        raise CheckpointError(
            f"does not see {file}, which rank 0 has just made; all ranks must see the same directory: put it on a shared disk"
        ) from None
    try:
        for piece in mine:
            put(fd, laid, piece.spec, piece.tensor)
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


def put(fd: int, laid: LaidOut, spec: AnyShardSpec, tensor: Tensor) -> None:
    """Write what is held of one tensor at its places: positioned writes, since what is mapped is written in whole pages, and on a
    network's disk those of one rank would overwrite its neighbours'."""
    raw = _bytes(tensor).numpy().data
    width, start, at = tensor.element_size(), laid.offsets[spec.name], 0
    if tuple(tensor.shape) != spec.local_shape:
        raise CheckpointError(
            f"{spec.name}: a tensor of shape {tuple(tensor.shape)} for a place of {spec.local_shape}"
        )
    for first, length in runs(spec):
        offset, stop = start + first * width, at + length * width
        while at < stop:
            done = os.pwrite(fd, raw[at:stop], offset)
            at, offset = at + done, offset + done


def _bytes(tensor: Tensor) -> Tensor:
    flat: Any = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8)


# -- one for all --


def _together(group: Group, device: torch.device, work: Callable[[], None]) -> None:
    """Do it, and come back when all have: with an error if one of them had one."""
    wrong = ""
    try:
        work()
    except (OSError, CheckpointError) as e:
        wrong = str(e)
    agree(group, wrong, device)


def agree(group: Group, wrong: str, device: torch.device = CPU) -> None:
    """Every rank calls it and says what is wrong ("": nothing). Raises the same on all of them if one has something to say."""
    failed = torch.zeros(group.size, dtype=torch.int64, device=device)
    failed[group.rank] = int(bool(wrong))
    group.all_reduce({"failed": failed}).wait()
    ranks = failed.nonzero().view(-1).tolist()
    if not ranks:
        return
    text = torch.zeros(TEXT, dtype=torch.int64, device=device)
    if group.rank == ranks[0]:
        raw = wrong.encode()[:TEXT]
        text[: len(raw)] = torch.tensor(list(raw), dtype=torch.int64)
    group.broadcast({"text": text}, source=ranks[0]).wait()
    said = bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")
    others = f" (and {len(ranks) - 1} more ranks)" if len(ranks) > 1 else ""
    raise CheckpointError(f"rank {ranks[0]}{others}: {said}" if group.size > 1 else said)


def check_common(folder: Path, group: Group, device: torch.device = CPU) -> None:
    """Every rank calls it, before there is anything to lose: can rank 0 write in `folder`, and do all ranks see it?"""
    token = _token(group, device)
    mark = folder / f".seen-{token:016x}"
    try:
        _together(
            group, device, lambda: _create(mark, LaidOut(b"", {}, 0)) if group.rank == 0 else None
        )
        _together(group, device, lambda: _fill(mark, LaidOut(b"", {}, 0), ()))
    finally:
        if group.rank == 0:
            mark.unlink(missing_ok=True)


# -- reading --


class Reader:
    """A safetensors file of which only the regions asked for are read."""

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
        """This region of the tensor `name`, whatever the name in `spec` is."""
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
