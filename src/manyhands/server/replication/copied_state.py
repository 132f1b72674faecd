"""State of a shard beside its rows: what a copy needs to go on exactly as the original.

Dedup marks (a push that is sent again must be known), pending pushes, commits, what workers pulled
and remember, the versions of tables, and how often admission has seen ids.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from manyhands.server.pending import PendingPush
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol.arrays import pack
from manyhands.server.shard import Shard
from manyhands.server.tables.sparse import SparseTable

Arrays = dict[str, np.ndarray]


def give_state(shard: Shard, number: int) -> tuple[r.CopyState, list[np.ndarray]]:
    """Message and payload; nothing may change the shard meanwhile."""
    arrays: Arrays = {"marks": shard.dedup.dump(), "deleted": shard.deletions()}
    pending: list[Any] = []
    for worker, push in shard.pending.all():
        at = len(pending)
        tables = {}
        for name, updates in push.updates.items():
            ids = push.ids.get(name)
            tables[name] = [push.lrs[name], push.weights[name], len(updates), ids is not None]
            for i, update in enumerate(updates):
                arrays[f"pending/{at}/{name}/{i}/updates"] = update
                if ids is not None:
                    arrays[f"pending/{at}/{name}/{i}/ids"] = ids[i]
        pending.append([worker, push.clock, tables])
    arrays["pending"] = np.frombuffer(json.dumps(pending).encode(), np.uint8)
    for (worker, name), seen in shard.compensation.seen.items():
        arrays[f"seen/{worker}/{name}"] = seen
    for name, table in shard.contents.items():
        if isinstance(table, SparseTable):
            arrays[f"sketch/{name}"], arrays[f"counts/{name}"] = table.storage.admission()
    described, parts = pack(arrays)
    versions = {
        name: [table.version, table.optimizer.step] for name, table in shard.contents.items()
    }
    pulled = [(worker, name, version) for (worker, name), version in shard.pulled.items()]
    message = r.CopyState(number, shard.committed, shard.version, versions, pulled, described)
    return message, parts


def take_state(shard: Shard, message: r.CopyState, arrays: Arrays) -> None:
    with shard.lock:
        shard.committed, shard.version = message.committed, message.version
        shard.dedup.load(arrays["marks"])
        shard.take_deletions(arrays["deleted"])
        for name, (version, step) in message.tables.items():
            table = shard.contents[name]
            table.version, table.optimizer.step = version, step
            if isinstance(table, SparseTable):
                table.storage.set_time(version)
                table.storage.admit_as(arrays[f"sketch/{name}"], arrays[f"counts/{name}"])
        shard.pulled = {(worker, name): version for worker, name, version in message.pulled}
        shard.pending.replace(_pending(arrays))
        shard.compensation.seen = {}
        for key, x in arrays.items():
            if key.startswith("seen/"):
                worker, name = key.removeprefix("seen/").split("/", 1)
                shard.compensation.seen[int(worker), name] = x.copy()


def _pending(arrays: Arrays) -> dict[int, PendingPush]:
    found = {}
    for at, (worker, clock, tables) in enumerate(json.loads(arrays["pending"].tobytes())):
        push = found[worker] = PendingPush(clock)
        for name, (lr, weight, count, has_ids) in tables.items():
            push.lrs[name], push.weights[name] = lr, weight
            of = f"pending/{at}/{name}"
            push.updates[name] = [arrays[f"{of}/{i}/updates"].copy() for i in range(count)]
            if has_ids:
                push.ids[name] = [arrays[f"{of}/{i}/ids"].copy() for i in range(count)]
    return found
