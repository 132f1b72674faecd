"""Rank state: the tensors of one rank's part of a model and its optimizer, by their names there.

    WholeTensorState   a module with the rank's own parameters, and the optimizer on them
    SlicedState        ZeRO: the rank's slice of each parameter, and of the optimizer's state

`Resharding` makes global tensors of them, and of global tensors a rank state.
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
from manyhands.split.shard_slice import AnyShardSpec, ShardSlice
from manyhands.split.shard_spec import ShardSpec


class RankState(Protocol):
    """Rank state. It returns the tensors themselves, not copies: training changes them."""

    def model(self) -> Tensors: ...
    def load_model(self, local: Tensors) -> None: ...
    def optimizer(self) -> tuple[Tensors, dict[str, Any]]:
        """State under "<parameter>/<key>", and plain values. All replicas call it together."""
        ...

    def load_optimizer(self, local: Tensors, meta: dict[str, Any]) -> None: ...


class WholeTensorState:
    """Rank state of a module with whole parameters, as far as tensor and pipe leave them whole.

    `sum_over_replicas` sums over the ranks that hold the same tensors and share their update."""

    def __init__(self, module: nn.Module, update: Update, sum_over_replicas: Sum):
        self.module, self.update, self.sum = module, update, sum_over_replicas

    def model(self) -> Tensors:
        return {k: v.detach() for k, v in self.module.state_dict().items() if isinstance(v, Tensor)}

    def load_model(self, local: Tensors) -> None:
        state.load_model(self.module, local)

    def optimizer(self) -> tuple[Tensors, dict[str, Any]]:
        # replicas that share the update keep a part of the state each: it is summed up first
        if not isinstance(self.update, WholeUpdate):
            return self.update.save(self.sum)
        optimizer = self.update.optimizer
        tensors, numbers = _optimizer_state(
            optimizer, {id(p): n for n, p in self.module.named_parameters()}
        )
        groups = state.plain_groups(
            self.module, optimizer, [g["params"] for g in optimizer.param_groups]
        )
        return tensors, {"groups": groups, "numbers": numbers}

    def load_optimizer(self, local: Tensors, meta: dict[str, Any]) -> None:
        self.update.load(local, meta)


class SlicedState:
    """Rank state under ZeRO: slices of parameters, and of the optimizer's state."""

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
        """Ranks that share memory: each owner writes its slice while no other rank reads it."""
        if self.flat.common_bytes:
            self.flat.refresh(always=True)
        slices, module = self._slices(), self.flat.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in local.items():
                (slices[name] if name in slices else module[name]).copy_(value)
        self.flat.refresh(always=True)

    def optimizer(self) -> tuple[Tensors, dict[str, Any]]:
        update = self.update
        tensors, numbers = _optimizer_state(
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

    def shard_specs(self, specs: Mapping[str, ShardSpec]) -> dict[str, AnyShardSpec]:
        """The slices that this rank holds of the shards `specs` of its shard axis."""
        sliced, whole = self.flat.owned(), self._whole()
        parameters = {n for n, _ in self.flat.module.named_parameters(remove_duplicate=False)}
        found: dict[str, AnyShardSpec] = {}
        for name, spec in specs.items():
            if name in sliced:
                found[name] = ShardSlice(spec, *sliced[name])
            elif name not in parameters or name in whole:
                found[name] = spec
        return found

    def _whole(self) -> set[str]:
        """Parameters that are not sharded: frozen ones, where nothing is gathered."""
        first = {id(p): n for n, p in self.flat.module.named_parameters()}
        sliced = self.flat.owned()
        return {
            n
            for n, p in self.flat.module.named_parameters(remove_duplicate=False)
            if first[id(p)] not in sliced
        }

    def _slices(self) -> Tensors:
        found: Tensors = {}
        for span in (*self.flat.spans, *self.flat.frozen):
            for entry in span.entries:
                found[entry.name] = span.value[span.own_slice(entry)]
        return found


def _optimizer_state(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[Tensors, dict[str, dict[str, Any]]]:
    """Tensors and numbers of the optimizer's state; `names` has its parameters by id."""
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
