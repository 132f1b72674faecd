"""Metric set: all metrics of a task during an evaluation, functions and accumulating objects.

    function(outputs, target)         a mean over the samples of a batch: summed with their number
    object.update(outputs, target)    accumulates; ranks merge its states, then compute()

An object of this rank is a copy of the task's, so ranks that are threads do not share one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.core import Group
from manyhands.errors import ManyhandsError, TaskError
from manyhands.metrics.declared_states import RankValues, declared_states
from manyhands.metrics.predicted_classes import wide
from manyhands.metrics.state_exchange import all_gather_vectors, pack, unpack
from manyhands.metrics.user_line import user_line

MOST_VALUES = 256  # of one metric


class MetricSet:
    """Metrics by name. `ranks`: whether there are several, so that states must be merged."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, ranks: int = 1):
        self.names = tuple(metrics)
        self.functions = {n: m for n, m in metrics.items() if not accumulates(m)}
        self.objects = {
            n: AccumulatedMetric(n, m, device, ranks)
            for n, m in metrics.items()
            if n not in self.functions
        }
        self.samples = 0  # that the objects have seen since the last reset

    def reset(self) -> None:
        self.samples = 0
        for metric in self.objects.values():
            metric.reset()

    def update(self, outputs: Any, target: Any, samples: int) -> None:
        """Let the objects see a batch."""
        self.samples += samples
        for metric in self.objects.values():
            metric.update(outputs, target)

    def means(self, outputs: Any, target: Any) -> list[Tensor]:
        """The functions' values for a batch."""
        found = []
        for name, function in self.functions.items():
            with naming(name):
                value = function(outputs, target)
            found.append(mean_value(name, value))
        return found

    def all_gather(self, group: Group, device: torch.device, counts: bool = True) -> list[Tensor]:
        """The objects' states on all ranks, for `merge`; `counts`: whether those of this rank do.
        Every rank calls it."""
        if not self.objects:
            return []
        mine = torch.zeros(0, dtype=torch.int64)
        if counts and self.samples:
            seen = torch.tensor([self.samples])
            mine = pack([[seen], *(s for m in self.objects.values() for s in m.read())])
        return all_gather_vectors(mine, group, device)

    def merge(self, gathered: Sequence[Tensor], interleaved: bool) -> None:
        """Take the states of all ranks together. `interleaved`: ranks took samples in turn."""
        found = [unpack(vector) for vector in gathered if vector.numel()]
        seen = [int(lists[0][0]) for lists in found]
        at = 1
        for metric in self.objects.values():
            states = len(metric.states)
            parts = [lists[at : at + states] for lists in found]
            with naming(metric.name):
                metric.merge(parts, seen, interleaved)
            at += states

    def compute(self, means: Mapping[str, float]) -> dict[str, float]:
        """The values of all metrics, given those of the functions, in the order of the task's. An
        object that computes several gives `name/key`."""
        found: dict[str, float] = {}
        for name in self.names:
            values = {name: means[name]} if name in means else self.objects[name].compute()
            if twice := found.keys() & values.keys():
                raise TaskError(
                    f"two metrics compute {min(twice)!r}; give one of them another name"
                )
            found |= values
        return found


class AccumulatedMetric:
    """This rank's copy of an accumulating metric."""

    def __init__(self, name: str, metric: Any, device: torch.device, ranks: int):
        self.name = name
        try:
            self.metric = copy.deepcopy(metric)
        except Exception as e:
            raise TaskError(
                f"metric {name}, a {type(metric).__name__}, cannot be copied ({e}); each rank "
                "needs one of its own: keep no open files, locks or generators in it"
            ) from e
        if isinstance(self.metric, nn.Module):
            self.metric.to(device)
        with naming(name):
            states = declared_states(self.metric)
            if states is None and ranks > 1:  # nobody knows how to merge it: all rows go to all
                self.metric = ReplayedMetric(self.metric)
                states = declared_states(self.metric)
            self.states = states or []
            self.reset()
        for part in self._parts():
            if hasattr(part, "distributed_available_fn"):
                # ranks merge the states before compute(), which would do it a second time
                part.distributed_available_fn = _alone

    def reset(self) -> None:
        with naming(self.name):
            self.metric.reset()

    def update(self, outputs: Any, target: Any) -> None:
        with naming(self.name):
            self.metric.update(outputs, target)

    def read(self) -> list[list[Tensor]]:
        for part in self._parts():
            if hasattr(part, "compute_groups"):  # of a MetricCollection: only the first of a group
                part.values(copy_state=False)  # is updated; this lets the others have its states
        with naming(self.name):
            return [state.read() for state in self.states]

    def merge(
        self, parts: Sequence[Sequence[list[Tensor]]], seen: Sequence[int], interleaved: bool
    ) -> None:
        for i, state in enumerate(self.states):
            values = [RankValues(p[i], n) for p, n in zip(parts, seen, strict=True)]
            state.merge(values, interleaved)
        for part in self._parts():
            if hasattr(part, "_update_count"):  # torchmetrics warns of a metric without updates
                part._update_count = max(1, part._update_count)
                part._computed = None

    def compute(self) -> dict[str, float]:
        with naming(self.name):
            value = self.metric.compute()
        found = dict(_flattened(self.name, value, self.name))
        if len(found) > MOST_VALUES:
            raise TaskError(
                f"metric {self.name} computes {len(found)} numbers, but a run records at most "
                f"{MOST_VALUES} of one metric; compute a curve or a matrix after the run"
            )
        return found

    def _parts(self) -> Iterator[Any]:
        yield from self.metric.modules() if isinstance(self.metric, nn.Module) else [self.metric]


class ReplayedMetric:
    """An accumulating metric that declares no states: it sees the outputs and targets of all ranks
    at once."""

    reductions: ClassVar[Mapping[str, str]] = {"outputs": "rows", "targets": "rows"}

    def __init__(self, metric: Any):
        self.metric = metric
        self.reset()

    def reset(self) -> None:
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, outputs: Any, target: Any) -> None:
        if not (isinstance(outputs, Tensor) and isinstance(target, Tensor)):
            raise TaskError(
                f"{type(self.metric).__name__} does not say how ranks merge what it holds; give "
                'it reductions = {"hits": "sum", ...}, with its attributes'
            )
        self.outputs.append(outputs.detach().cpu())
        self.targets.append(target.detach().cpu())

    def compute(self) -> Any:
        self.metric.reset()
        self.metric.update(torch.cat(self.outputs), torch.cat(self.targets))
        return self.metric.compute()


def accumulates(metric: Any) -> bool:
    """Whether a metric is an object that accumulates."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Name the metric in what it raises, and show the user's line."""
    try:
        yield
    except TaskError as e:
        if str(e).startswith("metric "):
            raise
        raise TaskError(f"metric {name}: {e}") from e
    except ManyhandsError:
        raise
    except Exception as e:
        raise TaskError(f"metric {name} failed: {type(e).__name__}: {e}{user_line(e)}") from e


def mean_value(name: str, value: Any) -> Tensor:
    """A function's value for a batch, in float64."""
    if isinstance(value, Tensor):
        return wide(value.detach()).mean()
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError):
        raise TaskError(
            f"metric {name} returned a {type(value).__name__}, but a number is needed"
        ) from None


def _flattened(name: str, value: Any, whose: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flattened(f"{name}/{key}", one, whose)
    elif _several(value):
        for i, one in enumerate(value):
            yield from _flattened(f"{name}/{i}", one, whose)
    else:
        try:
            yield name, float(value)
        except (TypeError, ValueError):
            raise TaskError(
                f"metric {whose} computed a {type(value).__name__}, but a number, or a dict of "
                "numbers, is needed"
            ) from None


def _several(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0 and len(value.reshape(-1)) != 1
    return isinstance(value, list | tuple)


def _alone() -> bool:
    return False
