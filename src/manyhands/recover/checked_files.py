"""Checked files: sizes, digests and syncs of the files of a checkpoint.

The tensors of a checkpoint have a digest of the whole file, and one for each of its chunks: a rank
that resumes hashes the chunks that it reads from, not the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from manyhands.errors import CheckpointError

CHUNK_BYTES = 16 * 2**20  # of 100 GB of tensors the manifest then has 400 kB of digests
CHUNKS = "chunks"  # of the manifest: their size and digests

Extent = tuple[int, int]  # first byte of a file, and the first one after


def check_file(path: Path, name: str, saved: Mapping[str, Any], check: bool) -> None:
    """Compare a file's size, and with `check` its content, with what the manifest says."""
    try:
        size = (path / name).stat().st_size
        digest = digest_of(path / name) if check and size == saved["bytes"] else saved["sha256"]
    except OSError as e:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} cannot be read ({e})") from e
    if size != saved["bytes"]:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {name} has {size} bytes, "
            f"the manifest says {saved['bytes']}"
        )
    _compare(path, name, digest, saved["sha256"])


def check_chunks(path: Path, name: str, saved: Mapping[str, Any], chunks: Iterable[int]) -> int:
    """Compare these chunks of a file with what the manifest says; returns the bytes hashed."""
    length, digests, hashed = saved[CHUNKS]["bytes"], saved[CHUNKS]["sha256"], 0
    try:
        with (path / name).open("rb", buffering=0) as f:
            for i in sorted(set(chunks)):
                f.seek(i * length)
                raw = f.read(length)
                hashed += len(raw)
                digest = hashlib.sha256(raw).hexdigest()
                _compare(path, name, digest, digests[i], f" at byte {i * length}")
    except OSError as e:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} cannot be read ({e})") from e
    return hashed


def chunks_of(extents: Iterable[Extent], chunk_bytes: int) -> set[int]:
    """The chunks in which these bytes lie."""
    return {
        i
        for first, stop in extents
        if first < stop
        for i in range(first // chunk_bytes, (stop - 1) // chunk_bytes + 1)
    }


def _compare(path: Path, name: str, digest: str, saved: str, where: str = "") -> None:
    if digest != saved:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {name} has checksum {digest[:12]}...{where}, "
            f"the manifest says {saved[:12]}..."
        )


def digest_of(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def digests_of(file: Path) -> dict[str, Any]:
    """Size and digests of a file and of its chunks, in one pass, as the manifest holds them."""
    whole, chunks, nbytes = hashlib.sha256(), [], 0
    with file.open("rb", buffering=0) as f:
        while raw := f.read(CHUNK_BYTES):
            whole.update(raw)
            chunks.append(hashlib.sha256(raw).hexdigest())
            nbytes += len(raw)
    found = {"bytes": CHUNK_BYTES, "sha256": chunks}
    return {"sha256": whole.hexdigest(), "bytes": nbytes, CHUNKS: found}


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
