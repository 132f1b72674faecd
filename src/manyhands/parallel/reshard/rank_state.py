"""What one rank of a divided model holds, by its own names: tensors to put together with those of other ranks, and back.

LocalState      a module with the rank's own parameters, and the optimizer on them
LocalSlices     parameters that are spread over the shard axis: the rank's slice of each, and of the optimizer's state
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Tensors
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.replica import state
from manyhands.replica.update import Sum, Update, WholeUpdate
from manyhands.split.shard_slice import Region, ShardSlice
from manyhands.split.shard_spec import ShardSpec


class RankState(Protocol):
    """Tensors are given as they are, not as copies: they change when training goes on."""

    def model(self) -> Tensors: ...
    def load_model(self, local: Tensors) -> None: ...
    def optimizer(self) -> tuple[Tensors, dict[str, Any]]:
        """State under "<parameter>/<key>", and plain values. Replicas call it together."""
        ...

    def load_optimizer(self, local: Tensors, meta: dict[str, Any]) -> None: ...


class WholeTensorState:
    """`sum_over_replicas` is for ranks that hold the same of the model and share the work of updating it."""

    def __init__(self, module: nn.Module, update: Update, sum_over_replicas: Sum):
        self.module, self.update, self.sum = module, update, sum_over_replicas

    def model(self) -> Tensors:
        return {k: v.detach() for k, v in self.module.state_dict().items() if isinstance(v, Tensor)}

    def load_model(self, local: Tensors) -> None:
        state.load_model(self.module, local)

    def optimizer(self) -> tuple[Tensors, dict[str, Any]]:
        if not isinstance(
            self.update, WholeUpdate
        ):  # replicas share the work out: what each keeps must be put together first
            return self.update.save(self.sum)
        optimizer = self.update.optimizer
        tensors, numbers = _as_it_is(
            optimizer, {id(p): n for n, p in self.module.named_parameters()}
        )
        groups = state.plain_groups(
            self.module, optimizer, [g["params"] for g in optimizer.param_groups]
        )
        return tensors, {"groups": groups, "numbers": numbers}

    def load_optimizer(self, local: Tensors, meta: dict[str, Any]) -> None:
        self.update.load(local, meta)


class SlicedState:
    def __init__(self, flat: ShardedParameters, update: ShardUpdate):
        self.flat, self.update = flat, update

    def model(self) -> Tensors:
        slices = self._slices()
        parameters = {
            n for n, _ in self.flat.module.named_parameters(remove_duplicate=False)
        } - self._whole()
        rest = {
            k: v.detach()
            for k, v in self.flat.module.state_dict().items()
            if isinstance(v, Tensor) and k not in parameters
        }
        return {**slices, **rest}

    def load_model(self, local: Tensors) -> None:
        """What is common to ranks is written by its owners while nobody reads it."""
        if self.flat.common_bytes:
            self.flat.refresh(always=True)
        slices, module = self._slices(), self.flat.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in local.items():
                (slices[name] if name in slices else module[name]).copy_(value)
        self.flat.refresh(always=True)

    def optimizer(self) -> tuple[Tensors, dict[str, Any]]:
        update = self.update
        tensors, numbers = _as_it_is(
            update.optimizer, {id(view.parameter): view.name for view in self.flat.views}
        )
        return tensors, {
            "groups": state.plain_groups(self.flat.module, update.optimizer, update._groups),
            "numbers": numbers,
        }

    def load_optimizer(self, local: Tensors, meta: dict[str, Any]) -> None:
        held = {view.name: view.parameter for view in self.flat.views if view.value.numel()}
        mine = {k: v for k, v in local.items() if k.rpartition("/")[0] in held}
        numbers = {n: v for n, v in meta["numbers"].items() if n in held}
        state.load_named(
            self.update.optimizer,
            {id(p): n for n, p in held.items()},
            mine,
            {**meta, "numbers": numbers},
        )

    def regions(self, parts: Mapping[str, ShardSpec]) -> dict[str, Region]:
        """Where this rank's slices lie, of what `parts` says that the ranks of its shard axis hold together."""
        sliced, whole = self.flat.runs(), self._whole()
        parameters = {n for n, _ in self.flat.module.named_parameters(remove_duplicate=False)}
        found: dict[str, Region] = {}
        for name, part in parts.items():
            if name in sliced:
                found[name] = ShardSlice(part, *sliced[name])
            elif name not in parameters or name in whole:
                found[name] = part
        return found

    def _whole(self) -> set[str]:
        """Parameters that are not spread: frozen ones, where nothing is gathered."""
        first = {id(p): n for n, p in self.flat.module.named_parameters()}
        sliced = self.flat.runs()
        return {
            n
            for n, p in self.flat.module.named_parameters(remove_duplicate=False)
            if first[id(p)] not in sliced
        }

    def _slices(self) -> Tensors:
        found: Tensors = {}
        for span in (*self.flat.spans, *self.flat.frozen):
            for place in span.places:
                start, stop = span.run(place)
                lo = place.start + start - span.own.start if start < stop else 0
                found[place.name] = span.value[lo : lo + stop - start]
        return found


def _as_it_is(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """Tensors and numbers that the optimizer keeps of what it holds, which `names` knows by identity."""
    tensors: Tensors = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value.detach()
            elif isinstance(value, int | float | bool):
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers
