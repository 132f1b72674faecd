"""Hashing of row ids: one 64-bit hash decides an id's slot, its index bucket and its first values.

The hash depends on the table's name and the id only, so it is the same on every machine and in
every process.
"""

import hashlib

import numpy as np

from manyhands.kernels.compile import U32, U64, compiled, inlined


def seed_of(name: str, seed: int = 0) -> int:
    """64 bits for a table: of its name alone to place rows, with its seed to initialise them. Its
    namespace (`NAMESPACE::name`) is left out: rows start the same in every namespace."""
    own = name.rpartition("::")[2]
    return int.from_bytes(
        hashlib.blake2b(f"{seed}/{own}".encode(), digest_size=8).digest(), "little"
    )


@inlined
def mix(x):
    """64 bits to 64 bits, each of which depends on all (MurmurHash3's finisher)."""
    x = U64(x)
    x = (x ^ (x >> U64(33))) * U64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> U64(33))) * U64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> U64(33))


@inlined
def mix32(x):
    x = U32(x)
    x = U32((x ^ (x >> U32(16))) * U32(0x85EBCA6B))
    x = U32((x ^ (x >> U32(13))) * U32(0xC2B2AE35))
    return U32(x ^ (x >> U32(16)))


@compiled
def hash_ids(ids, seed, hashes):
    for i in range(ids.size):
        hashes[i] = mix(U64(ids[i]) ^ seed)


@compiled
def _slots(ids, seed, mask, out):
    for i in range(ids.size):
        out[i] = mix(U64(ids[i]) ^ seed) & mask


def hash64(name: str, number: int) -> int:
    """The hash of one row: the lower bits decide its slot, the upper bits its index bucket."""
    return int(mix(U64((number ^ seed_of(name)) & 0xFFFFFFFFFFFFFFFF)))


def slot_of(ids: np.ndarray, table_seed: int, slots: int) -> np.ndarray:
    """The slots (a power of two of them) of ids; `table_seed` is `seed_of(name)`."""
    assert slots & (slots - 1) == 0, slots
    out = np.empty(ids.size, np.int64)
    _slots(ids, U64(table_seed), U64(slots - 1), out)
    return out
