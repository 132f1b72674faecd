"""Overhead of manyhands where it brings nothing: one process against a hand-written loop."""

from __future__ import annotations

import functools

from common import Claim, alternate, median
from data_parallel import ours, peer


def measure(quick: bool, only: list[str]) -> list[Claim]:
    steps = 5 if quick else 600
    found = alternate(
        {
            "ours": functools.partial(ours, "lenet", 64, 1, steps),
            "hand-written": functools.partial(peer, "lenet", 64, 1, steps, False),
        },
        1 if quick else 7,
    )
    mine, theirs = (median([s for s, _ in v]) for v in found.values())
    detail = {"all runs": {k: [round(s) for s, _ in v] for k, v in found.items()}}
    return [Claim("lenet_1", mine, theirs, "samples/s", mine / theirs, 0.97, detail)]
