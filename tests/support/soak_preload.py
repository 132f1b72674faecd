"""Preload of a soak's fork server: the compiled loops of a client are loaded once."""

from __future__ import annotations

import numpy as np

from manyhands.server.client.server_store import ServerStore  # noqa: F401  for the import itself
from manyhands.server.slots import SLOTS
from manyhands.server.tables.gradient_kernels import finite
from manyhands.server.tables.partition import partition

cut = partition(np.arange(8), "any", np.arange(SLOTS, dtype=np.uint16) % 2, 2)
for kind in (np.float32, np.float64):
    updates = np.ones(16, kind)
    for shard in range(2):
        part = np.empty(2 * cut.ids(shard).size, kind)
        cut.collect(updates, shard, 2, part)
        cut.spread(part, shard, 2, updates)
    assert finite(updates)
