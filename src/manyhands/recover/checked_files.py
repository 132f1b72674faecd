"""Checked files: sizes, digests and syncs of the files of a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.errors import CheckpointError


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
    if digest != saved["sha256"]:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {name} has checksum {digest[:12]}..., "
            f"the manifest says {saved['sha256'][:12]}..."
        )


def digest_of(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
