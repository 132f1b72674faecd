"""What the loop works with, as it sees it: a rule with its link and state, a link that keeps account, a dealer of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from manyhands.core import (
    Group,
    Position,
    Replica,
    Store,
    Strategy,
    Tensors,
)


class MeteredGroup(Group, Protocol):
    """A group that keeps account of itself (`exchange.observed`)."""

    round: int

    @property
    def seconds(self) -> float: ...


class Gauge(Protocol):
    """What measures the gradient noise scale (`exchange.noise_scale`)."""

    def take(self) -> Tensor: ...
    def read(self, sums: Sequence[float]) -> float: ...


class StepClaimer(Protocol):
    """Who gives a rank its next step, where ranks go at their own pace (`data.step_claims`)."""

    latest: Position  # after the step drawn last

    def claim(self, limit: float) -> bool: ...
    def request_sync(self) -> None: ...
    def sync(self, steps: int) -> None: ...
    def claimed_steps(self) -> int: ...
    def stop_claiming(self) -> None: ...
    def steps_to(self, epochs: float) -> float: ...


@dataclass
class ActiveStrategy:
    """A strategy at work: its link (the run's own, that behind a wire, or servers) and its state. `part` is its word in the plan."""

    part: str  # merge, or then
    name: str
    strategy: Strategy[Any, Any]
    link: Group | Store
    state: Tensors
    gauge: Gauge | None = None
    wire_state: Callable[[], Tensors] = dict

    def consensus(self, replica: Replica, group: Group) -> Tensors | None:
        """The one model that all replicas stand for; over the bare `group`, as wires are for rounds, or over servers."""
        return self.strategy.consensus(
            replica, group if self.strategy.link is Group else self.link, self.state
        )
