"""Shard claims: ranks claim small shards of one batch from a counter in the store of all ranks.

    claim     the next shard that nobody has; when all are claimed, a copy of the oldest that is not
              finished, once
    finish    True for the first rank that has computed a shard: its result counts, no other does

So a slow rank computes fewer shards than a fast one, and the last shards of a slow rank are
computed by others too. Each evaluation of a batch has keys of its own, which are deleted in the
next one: between the two lies an exchange in which all ranks take part.

Paper: Dean et al. 2012, "Large Scale Distributed Deep Networks" (NIPS): Sandblaster's coordinator.
"""

from __future__ import annotations

from typing import Protocol

BITS = 62  # shards in one word of the store, a signed int64


class Counters(Protocol):
    """A key-value store of all ranks whose numbers only one of them changes at a time, such as
    torch's."""

    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class ShardClaims:
    """One rank's view of the shards."""

    def __init__(self, store: Counters, rank: int, size: int):
        self._store, self._rank, self._size = store, rank, size
        self._evaluation = self._shards = 0
        self._copies: list[int] = []  # shards that this rank has claimed a second time

    def begin(self, shards: int) -> None:
        """Begin an evaluation of so many shards; all ranks do, with an exchange in between."""
        self._delete()
        self._evaluation, self._shards, self._copies = self._evaluation + 1, shards, []

    def claim(self) -> int | None:
        """A shard to compute; None: all are finished, or at work on two ranks."""
        number = self._store.add(self._key("next"), 1) - 1
        if number < self._shards:
            return number
        for shard in self._outstanding():
            if self._store.add(self._key(f"copy/{shard}"), 1) == 1:
                self._copies.append(shard)
                return shard
        return None

    def finish(self, shard: int) -> bool:
        """Whether this rank is the first to finish a shard."""
        if self._store.add(self._key(f"done/{shard}"), 1) != 1:
            return False
        word, bit = divmod(shard, BITS)
        self._store.add(self._key(f"finished/{word}"), 1 << bit)
        return True

    def finished(self, shard: int) -> bool:
        word, bit = divmod(shard, BITS)
        return bool(self._finished(word) >> bit & 1)

    def _outstanding(self) -> list[int]:
        words = [self._finished(word) for word in range(self._words)]
        return [k for k in range(self._shards) if not words[k // BITS] >> k % BITS & 1]

    def _finished(self, word: int) -> int:
        return int(self._store.add(self._key(f"finished/{word}"), 0))

    @property
    def _words(self) -> int:
        return -(-self._shards // BITS)

    def _delete(self) -> None:
        """Each rank deletes its part of the keys of the evaluation before."""
        names = [f"done/{k}" for k in range(self._rank, self._shards, self._size)]
        names += [f"copy/{k}" for k in self._copies]
        if self._rank == 0 and self._evaluation:
            names += ["next", *(f"finished/{word}" for word in range(self._words))]
        for name in names:
            self._store.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"shards/{self._evaluation}/{name}"
