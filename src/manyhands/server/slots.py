"""Slot map: which shard stores which rows.

    slot = hash64(table, id) mod SLOTS;   shard = owner[slot]

Every row of a sparse table belongs to one of a fixed number of slots, and every slot to a shard. A
dense table is split into one contiguous range per shard instead, at multiples of BLOCK elements.
Each shard is held by a chain of servers (`chains`), the first of which serves workers. Whatever
changes, the map gets a new `epoch`, and a client with an older one is told so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from manyhands.server.protocol.messages import (
    AssignSlots,
    ServerEntry,
    ShardAddress,
    ShardChain,
)
from manyhands.server.protocol.row_encoding import BLOCK
from manyhands.server.tables.hashing import seed_of, slot_of

SLOTS = 1024  # a power of two


def even(shards: int) -> np.ndarray:
    """Slots in turn: shard s mod shards owns slot s."""
    return (np.arange(SLOTS) % shards).astype(np.uint16)


@dataclass(frozen=True, eq=False)
class SlotMap:
    """The owner of each slot, and the addresses of the shards."""

    epoch: int
    owner: np.ndarray = field(repr=False)  # uint16 per slot
    shards: tuple[ShardAddress, ...]  # where workers reach each
    servers: Mapping[int, ShardAddress] = field(default_factory=dict)  # by number
    chains: tuple[ShardChain, ...] = ()  # by shard

    @classmethod
    def start(cls, shards: Sequence[ShardAddress], epoch: int = 1) -> SlotMap:
        return cls(epoch, even(len(shards)), tuple(shards))

    @classmethod
    def of(cls, message: AssignSlots) -> SlotMap:
        return cls(
            message.epoch,
            np.frombuffer(message.owner, np.uint16),
            tuple(message.shards),
            {each.number: each.where for each in message.servers},
            tuple(message.chains),
        )

    def message(self) -> AssignSlots:
        servers = [ServerEntry(number, where) for number, where in self.servers.items()]
        return AssignSlots(
            self.epoch, self.owner.tobytes(), list(self.shards), servers, list(self.chains)
        )

    def placed(self, servers: Mapping[int, ShardAddress], chains: Sequence[ShardChain]) -> SlotMap:
        """The map of the next epoch, with the same slots on these chains."""
        return SlotMap(self.epoch + 1, self.owner, heads(servers, chains), servers, tuple(chains))

    def lost_slots(self, shard: int) -> np.ndarray:
        return np.flatnonzero(self.owner == shard)

    def shard_of(self, table: str, ids: np.ndarray) -> np.ndarray:
        return self.owner[slot_of(np.ascontiguousarray(ids, np.int64), seed_of(table), SLOTS)]

    def by_load(self, loads: np.ndarray) -> SlotMap:
        """A map of the next epoch, balanced by measured loads, one per slot.

        The fullest shard gives slots to the emptiest, the heaviest slot that still helps first, so
        that few slots move.
        """
        owner, shards = self.owner.copy(), len(self.shards)
        total = np.bincount(owner, weights=loads, minlength=shards)
        while True:
            most, least = int(total.argmax()), int(total.argmin())
            gap = total[most] - total[least]
            # a heavier slot would only swap the two
            mine = np.flatnonzero((owner == most) & (loads > 0) & (loads < gap))
            if not mine.size:
                return replace(self, epoch=self.epoch + 1, owner=owner)
            slot = mine[np.abs(loads[mine] - gap / 2).argmin()]
            owner[slot] = least
            total[most] -= loads[slot]
            total[least] += loads[slot]

    def balance(self, loads: np.ndarray) -> float:
        """The heaviest shard's load over the mean."""
        total = np.bincount(self.owner, weights=loads, minlength=len(self.shards))
        return float(total.max() / total.mean()) if total.sum() else 1.0


def heads(
    servers: Mapping[int, ShardAddress], chains: Sequence[ShardChain]
) -> tuple[ShardAddress, ...]:
    """Where workers reach each shard: at the first server of its chain."""
    nowhere = ShardAddress("", 0)
    found = [servers[c.members[0]] if c.members else nowhere for c in chains]
    return tuple(
        ShardAddress(each.host, each.port, shard, each.local, each.machine)
        for shard, each in enumerate(found)
    )


def ranges(length: int, shards: int, dim: int = 1) -> list[tuple[int, int]]:
    """The range of a dense table that each shard stores; cut between rows of `dim`."""
    unit = math.lcm(BLOCK, dim)
    cuts = [min(length, -(-length // unit) * s // shards * unit) for s in range(shards + 1)]
    return list(pairwise(cuts))
