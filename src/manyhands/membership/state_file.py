"""State file: the newest of two slots, so that a write that is cut off never costs the one before.

    <name>.0   header (magic, term, counter, length, crc32), then the state
    <name>.1   the same; a save writes the slot that does not have the newest state

A write that is killed half-way leaves a slot whose crc is wrong; the other has the state that was
acknowledged last. What a process wrote belongs to the kernel when `pwrite` returns, so `kill -9`
loses nothing; `fsync=True` waits for the disk, which loss of power asks for.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from manyhands.errors import MembershipError

_FIELDS = struct.Struct("<8sQQQ")  # magic, term, counter, length
_CRC = struct.Struct("<I")
_HEADER = _FIELDS.size + _CRC.size
_MAGIC = b"mhstate1"
_NOTHING = 2**64 - 1  # as length: no state was ever saved
_READS = 20  # of a reader, while a writer may be changing the slots under it
_PAUSE_S = 0.001


class Content(NamedTuple):
    """What a slot holds: the `counter`-th write, by the coordinator of `term`."""

    counter: int
    term: int
    state: bytes | None


def encode(content: Content) -> bytes:
    state = content.state
    length = _NOTHING if state is None else len(state)
    fields = _FIELDS.pack(_MAGIC, content.term, content.counter, length)
    body = state or b""
    return fields + _CRC.pack(zlib.crc32(body, zlib.crc32(fields))) + body


def decode(raw: bytes) -> Content | None:
    """None where the slot is torn or damaged."""
    if len(raw) < _HEADER:
        return None
    magic, term, counter, length = _FIELDS.unpack_from(raw)
    (crc,) = _CRC.unpack_from(raw, _FIELDS.size)
    size = 0 if length == _NOTHING else length
    if magic != _MAGIC or _HEADER + size > len(raw):
        return None
    body = raw[_HEADER : _HEADER + size]  # behind it: what is left of a longer state
    if crc != zlib.crc32(body, zlib.crc32(raw[: _FIELDS.size])):
        return None
    return Content(counter, term, None if length == _NOTHING else body)


class StateFile:
    """Both slots. One process at a time writes, which the claim sees to; any may read."""

    def __init__(self, path: Path, fsync: bool = False):
        self.slots = tuple(path.with_name(f"{path.name}.{i}") for i in (0, 1))
        self._fsync = fsync
        self._handles: list[int] = []
        self._newest, self._counter = 0, 0

    def open(self) -> Content:
        """Open both slots to write, make them where none are, and read the newest."""
        if not any(slot.exists() for slot in self.slots):
            for slot in self.slots:
                self._create(slot)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_CREAT
        self._handles = [os.open(slot, flags, 0o600) for slot in self.slots]
        content, self._newest = self._newest_of(self._whole())
        self._counter = content.counter
        return content

    def read(self) -> Content | None:
        """The newest state, also while another process writes; None where there is no file.

        A slot that is torn may be one that is being written, and the other one then be outdated
        by the time that it is read; so one good slot alone is believed only when it stays so.
        """
        for _ in range(_READS):
            if not any(slot.exists() for slot in self.slots):
                return None
            found = self._whole()
            if len(found) == len(self.slots):
                break
            time.sleep(_PAUSE_S)
        return self._newest_of(found)[0]

    def write(self, term: int, state: bytes | None) -> None:
        slot = 1 - self._newest
        content = Content(self._counter + 1, term, state)
        handle, rest, offset = self._handles[slot], encode(content), 0
        while offset < len(rest):
            offset += os.pwrite(handle, rest[offset:] if offset else rest, offset)
        if self._fsync:
            os.fdatasync(handle) if hasattr(os, "fdatasync") else os.fsync(handle)
        # only now: a write that failed is repeated on the slot that it damaged
        self._newest, self._counter = slot, content.counter

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles = []

    def _whole(self) -> list[tuple[Content, int]]:
        """The slots that are neither torn nor damaged."""
        found = []
        for i, slot in enumerate(self.slots):
            try:
                content = decode(slot.read_bytes())
            except FileNotFoundError:
                content = None
            if content is not None:
                found.append((content, i))
        return found

    def _newest_of(self, found: list[tuple[Content, int]]) -> tuple[Content, int]:
        if not found:
            raise MembershipError(
                f"both slots of the saved state are damaged: {self.slots[0]} and "
                f"{self.slots[1]}. Bring one of them back from a backup, or delete both to start "
                "the run without what its coordinator knew"
            )
        return max(found, key=lambda each: each[0].counter)

    def _create(self, slot: Path) -> None:
        new = slot.with_name(f"{slot.name}.new")  # one process at a time: the claim sees to it
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, encode(Content(0, 0, None)))
            if self._fsync:
                os.fsync(handle)
            os.replace(new, slot)
        finally:
            os.close(handle)
        if self._fsync:
            folder = os.open(slot.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
