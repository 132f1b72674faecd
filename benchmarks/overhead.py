"""Overhead of manyhands where it brings nothing: one process against a hand-written loop.

The loop has the fused optimizer and keeps freed memory, as ours does; as people write it, it is
told beside.
"""

from __future__ import annotations

import functools

from common import Claim, alternate, median
from data_parallel import ours, peer
from peers.tuning import AS_WRITTEN, TUNED


def measure(quick: bool, only: list[str]) -> list[Claim]:
    steps = 5 if quick else 600
    by_hand = functools.partial(peer, "lenet", 64, 1, steps, False)
    found = alternate(
        {
            "ours": functools.partial(ours, "lenet", 64, 1, steps),
            "tuned loop": functools.partial(by_hand, TUNED),
            "loop as written": functools.partial(by_hand, AS_WRITTEN),
        },
        1 if quick else 7,
    )
    mine, tuned, written = (median([s for s, _ in v]) for v in found.values())
    detail = {
        "as people write it": f"{written:,.0f} samples/s, ratio {mine / written:.3f}",
        "all runs": {k: [round(s) for s, _ in v] for k, v in found.items()},
    }
    return [Claim("lenet_1", mine, tuned, "samples/s", mine / tuned, 0.98, detail)]
