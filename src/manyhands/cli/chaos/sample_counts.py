"""Counts of samples: how often those of one epoch were computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EpochSamples:
    """Samples of one epoch, by how often they were computed."""

    epoch: int
    once: int = 0
    twice: int = 0  # or more often
    never: int = 0
