"""Read share: what one of several ranks reads of a checkpoint when a run resumes, and hashes.

Each rank hashes the chunks that hold the tensors it reads. Of a model that is split it reads slices
later, which are not known yet: the chunks of those tensors are divided among all ranks, so that
each is hashed once. Table files, which servers read, are divided too. Ranks then agree
(`assembly.resume`): what one of them finds damaged, none uses.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.core import Snapshot
from manyhands.errors import CheckpointError
from manyhands.recover.checked_files import CHUNKS, Extent, check_chunks, check_file, chunks_of
from manyhands.recover.checkpoint import TENSORS, read_manifest, read_tensors
from manyhands.recover.table_files import FILES

Names = Callable[[str], bool]


@dataclass(frozen=True)
class ReadShare:
    """`reads` are the tensors that this rank reads whole, `later` those that it reads slices of;
    both by their names in the file."""

    rank: int
    size: int
    reads: Names
    later: Names = lambda name: False

    def check_tensors(self, path: Path, name: str, manifest: Mapping[str, Any]) -> int:
        """Raise CheckpointError where what this rank is to hash is damaged; returns the bytes that
        were hashed."""
        check_file(path, name, manifest, check=False)
        if CHUNKS not in manifest:  # of an earlier version, which knows only the whole file
            check_file(path, name, manifest, check=self.rank == 0)
            return int(manifest["bytes"]) if self.rank == 0 else 0
        length = manifest[CHUNKS]["bytes"]
        header = _Header(path / name, manifest["bytes"])
        hashed = check_chunks(path, name, manifest, known := chunks_of([header.extent], length))
        mine, divided = [], []
        for tensor, extent in header.tensors().items():
            if self.reads(tensor):
                mine.append(extent)
            elif self.later(tensor):
                divided.append(extent)
        wanted = chunks_of(mine, length)
        wanted |= {i for i in chunks_of(divided, length) if i % self.size == self.rank}
        return hashed + check_chunks(path, name, manifest, wanted - known)

    def check_files(self, path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Compare the sizes of all files, and the content of this rank's share of them."""
        for i, (name, saved) in enumerate(sorted(files.items())):
            check_file(path, name, saved, check=i % self.size == self.rank)


def load_share(path: Path, share: ReadShare) -> Snapshot:
    """Read and check a rank's share of a checkpoint. Of other ranks' own tensors (`ranks`), which
    it does not read, it has the names and shapes."""
    manifest = read_manifest(path)
    share.check_tensors(path, TENSORS, manifest)
    share.check_files(path, manifest.get(FILES, {}))
    return read_tensors(path, manifest, share.reads, known="ranks")


class _Header:
    """Header of a safetensors file: where its tensors lie. `extent` is for its own checksum, which
    comes before `tensors`."""

    def __init__(self, file: Path, nbytes: int):
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8).ljust(8, b"\0"))
            # a damaged length is found by the checksum; it must not make us read for ever
            self.extent: Extent = (0, min(8 + length, nbytes))
            self._file, self._text = file, f.read(self.extent[1] - 8)

    def tensors(self) -> dict[str, Extent]:
        start = self.extent[1]
        try:
            return {
                name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
                for name, entry in json.loads(self._text).items()
                if name != "__metadata__"
            }
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            raise CheckpointError(
                f"checkpoint {self._file.parent} is damaged: {self._file.name} is not what this "
                f"program writes ({e})"
            ) from e
