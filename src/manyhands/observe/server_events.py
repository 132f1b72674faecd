"""Server events: counters of the parameter servers, about one event "server" a second from rank 0.

    rows_per_s  bytes_per_s  requests_per_s
                         pulled and pushed, all servers together
    queue                other requests in progress when the counters were read
    staleness  stale_<n> updates between a worker's pull and its push: mean (each class counts as
                         its middle), share of pushes
    hottest              share of all sampled row accesses that went to the hottest id of a table
    balance  shards      load of the busiest group of slots, and of the busiest shard, over the
                         mean; 1: even
    hit_rate             share of the rows looked up that the worker's cache had
    refused              connections refused, all reasons together

A store counts under its own names (`server.counters`), since they were read last; those not named
here keep their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from manyhands.core import Event
from manyhands.observe.text import rate, size

NAME = "server"
MIDDLE = {
    "stale_0": 0,
    "stale_1": 1,
    "stale_2": 2,
    "stale_3_4": 3.5,
    "stale_5_8": 6.5,
    "stale_9_16": 12.5,
    "stale_more": 24,
}
SUMS = {
    "rows_per_s": ("pulled_rows", "pushed_rows"),
    "bytes_per_s": ("pulled_bytes", "pushed_bytes"),
    "requests_per_s": ("server_requests",),
}


def server_event(
    stats: Mapping[str, float], time_s: float, round: int, seconds: float = 1.0
) -> Event:
    """The event of the counters of a store over the last `seconds`."""
    return Event(time_s, 0, round, NAME, value=figures(stats, seconds))


def figures(stats: Mapping[str, float], seconds: float) -> dict[str, float]:
    found = {
        name: sum(stats.get(k, 0.0) for k in keys) / max(seconds, 1e-9)
        for name, keys in SUMS.items()
    }
    pushes = sum(stats.get(k, 0.0) for k in MIDDLE)
    if pushes:
        found["staleness"] = (
            sum(stats.get(k, 0.0) * middle for k, middle in MIDDLE.items()) / pushes
        )
        found |= {k: stats[k] / pushes for k in MIDDLE if stats.get(k)}
    lookups = stats.get("cache_lookups", 0.0)
    if lookups:
        found["hit_rate"] = stats.get("cache_hits", 0.0) / lookups
    hot = [x for k, x in stats.items() if k.startswith("hot/")]
    if hot:
        found["hottest"] = max(hot)
    found["refused"] = sum(x for k, x in stats.items() if k.startswith("refused/"))
    used = {*MIDDLE, "cache_hits", "cache_lookups", *(k for keys in SUMS.values() for k in keys)}
    rest = {
        k.removeprefix("now/"): x
        for k, x in stats.items()
        if k not in used and not k.startswith(("hot/", "refused/"))
    }
    return {k: float(x) for k, x in {**found, **rest}.items()}


def words(value: Mapping[str, float]) -> str:
    """The main figures for a line on a terminal: 1.2M rows/s  stale 2.1

    Dense tables have no rows: 25.8 MB/s.
    """
    known = {k: x for k, x in value.items() if math.isfinite(x)}
    parts = [f"{rate(known['rows_per_s'])} rows/s"] if known.get("rows_per_s") else []
    parts += (
        [f"{size(int(known['bytes_per_s']))}/s"] if known.get("bytes_per_s") and not parts else []
    )
    parts += [f"stale {known['staleness']:.1f}"] if known.get("staleness") else []
    return "  ".join(parts)
