"""List of tables: one entry a table, from what each shard stores of it."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.server.protocol.table_messages import StoredPart


def total_of(shards: Sequence[Sequence[StoredPart]]) -> list[StoredPart]:
    """Sums over shards; a table that some shard does not have is being made or dropped, and is left
    out."""
    found: dict[str, list[StoredPart]] = {}
    for parts in shards:
        for part in parts:
            found.setdefault(part.table.name, []).append(part)
    return [
        StoredPart(parts[0].table, sum(p.rows for p in parts), sum(p.nbytes for p in parts))
        for parts in found.values()
        if len(parts) == len(shards)
    ]
