"""Parts of a trainer: what the training loop needs of the objects it is given, as protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.core import Event, Goal, Group, Position, Replica, Snapshot, Store, Strategy, Tensors


class MeteredGroup(Group, Protocol):
    """A group that adds up its own traffic (`exchange.observed`)."""

    round: int

    @property
    def seconds(self) -> float: ...


class EventLog(Protocol):
    """Where a rank's events go (`observe.events.Recorder`)."""

    def emit(self, event: Event) -> None: ...
    def flush(self) -> None: ...


class LoopContext(Protocol):
    """This rank's groups, device and run directory (`assembly.rank_context.RankContext`)."""

    device: torch.device
    recorder: Any  # an EventLog

    @property
    def group(self) -> MeteredGroup: ...  # all ranks
    @property
    def data_group(
        self,
    ) -> MeteredGroup: ...  # replicas: ranks that hold the same shard of the model
    @property
    def directory(self) -> Any: ...
    @property
    def leads(self) -> bool: ...  # whether this rank writes and reports for all: rank 0


class DataProgress(Protocol):
    """How far training is in the data (`data.batches.BatchIterator`)."""

    @property
    def position(self) -> Position: ...
    @property
    def samples(self) -> int | None: ...  # of one epoch; None while a stream has not ended once


class StepClaimer(Protocol):
    """Claims steps from a shared counter for an asynchronous rank (`data.step_claims`)."""

    latest: Position  # after the step claimed last

    @property
    def alone(self) -> bool: ...  # whether a block of steps must end before the one claimed last
    def claim(self, limit: float) -> bool: ...
    def request_sync(self) -> None: ...
    def sync(self, steps: int) -> None: ...
    def claimed_steps(self) -> int: ...
    def stop_claiming(self) -> None: ...
    def steps_to(self, epochs: float) -> float: ...


class Evaluator(Protocol):
    """Evaluates the model on the test data (`assembly.evaluation`)."""

    @property
    def has_data(self) -> bool: ...
    @property
    def metric_names(self) -> Sequence[str]: ...  # of what it returns; []: it has no data
    def named_buffers(self) -> Tensors: ...
    def evaluate(self) -> dict[str, float]: ...
    def average_buffers(self) -> None:
        """Average over ranks what is no parameter: BatchNorm's running statistics."""
        ...


class CheckpointWriter(Protocol):
    """Takes snapshots of a run and writes them (`assembly.checkpointing`)."""

    def take(self, round: int, active: ActiveStrategy, metrics: dict[str, float]) -> Snapshot: ...
    def save(self, snapshot: Snapshot, metrics: dict[str, float]) -> str:
        """Write the snapshot in the background and return the checkpoint's path."""
        ...

    def last_good(self) -> str | None: ...
    def last_failure(self) -> str:
        """Why the last save failed, after waiting for it; "": it did not."""
        ...

    def writer_lost(self) -> bool:
        """Whether the rank that was to write the last checkpoint has died since."""
        ...


class PushedTables(Protocol):
    """Tables on parameter servers, or in this process (`assembly.tables`)."""

    def flush(self) -> None:
        """Return when everything this rank has pushed is applied."""
        ...

    def report(self, round: int) -> None: ...


class EpochChange(Exception):
    """The ranks of an elastic run leave their group at a boundary, for the next one."""


class KeptBoundaries(Protocol):
    """Boundaries of rounds in a run whose ranks may die (`assembly.regroup.boundaries`)."""

    def pending(self) -> bool: ...
    def wants_to_keep(self) -> bool: ...
    def keep(self, round: int) -> None: ...
    def leave(self, round: int) -> None:
        """Keep this boundary and raise EpochChange."""
        ...


class StopFlag(Protocol):
    """Whether somebody asked the run to stop (`launch.signals.Stop`)."""

    @property
    def requested(self) -> int: ...  # the number of the signal, or 0


class EarlyStop(Protocol):
    """Ends a block of local steps on request (`launch.stopping.block_stop.BlockStop`)."""

    cut: bool  # whether it has ended the last one; the same on all ranks


class NoiseMeter(Protocol):
    """Measures the gradient noise scale (`exchange.noise_scale`)."""

    def take(self) -> Tensor: ...
    def read(self, sums: Sequence[float]) -> float: ...


@dataclass
class Milestones:
    """Rounds of a run at which something was done."""

    first: int  # where it started, or was resumed
    evaluated: int
    saved: int  # -1: never; what was resumed is saved already


@dataclass
class ActiveStrategy:
    """A merge strategy with the group or store it runs over and its state.

    `word` is its plan word: merge, or then for the strategy that the run changes to.
    """

    word: str
    name: str
    strategy: Strategy[Any, Any]
    link: Group | Store
    state: Tensors
    noise: NoiseMeter | None = None
    codec_state: Callable[[], Tensors] = dict  # error feedback and the like, of this rank
    load_codec_state: Callable[[Tensors], None] = lambda values: None

    def consensus(self, replica: Replica, group: Group) -> Tensors | None:
        """The one model that all replicas stand for. Computed over the uncompressed `group` (codecs
        are for rounds), or over servers."""
        link = group if self.strategy.link is Group else self.link
        return self.strategy.consensus(replica, link, self.state)


@dataclass(frozen=True)
class StrategyChange:
    """The strategy that a run changes to, and the goal at which it does."""

    at: Goal
    make: Callable[[], ActiveStrategy]
