"""What is written down of a run: where it stands, what it is to reach, what happened, and all of it at the end of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]  # named, same order on every rank, updated in place


@dataclass(frozen=True)
class Position:
    """Where training stands in the data, counted over all ranks: free of how many ranks there are."""

    epoch: int = 0
    offset: int = 0  # samples of this epoch already consumed
    steps: int = 0  # global batches consumed since the start


@dataclass(frozen=True)
class Goal:
    """A number to reach: `accuracy:0.88` is at least that, `-loss:0.3` at most; `epoch:5` and `step:1000` are goals too."""

    name: str
    bound: float
    at_most: bool = False

    @classmethod
    def parse(cls, text: str) -> Goal:
        name, colon, bound = text.rpartition(":")
        if not colon or not name.lstrip("-"):
            raise ValueError(
                "NAME:NUMBER is needed, such as epoch:5, accuracy:0.88 or -loss:0.3 (at most)"
            )
        return cls(name.lstrip("-"), float(bound), name.startswith("-"))

    def __str__(self) -> str:
        return f"{'-' if self.at_most else ''}{self.name}:{repr(self.bound).removesuffix('.0')}"

    def reached(self, values: Mapping[str, float]) -> bool:
        value = values.get(self.name, math.nan)
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass
class Snapshot:
    """All of a run at the end of a round, by parameter name: free of layout, world size and buffers.

    `params` is the one model that the ranks stand for. What is a rank's own (its model where replicas differ, its
    momentum, its error feedback) stands in `ranks` under "<rank>/<kind>/<name>", or "*/..." where all ranks have the same.
    """

    round: int
    params: Tensors
    optimizer: Tensors
    state: Tensors
    position: Position
    rng: Tensors = field(default_factory=dict)  # "<rank>/<generator>" -> bytes
    meta: dict[str, Any] = field(
        default_factory=dict
    )  # plain JSON: hyper-parameters, schedule, scaler, plan
    ranks: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """One thing that happened on one rank. Text, JSONL, TensorBoard and traces are sinks of the same events."""

    time_s: float
    rank: int
    round: int
    name: str
    seconds: float = 0.0
    nbytes: int = 0
    value: float | str | dict[str, float] | None = None


Emit = Callable[[Event], None]
