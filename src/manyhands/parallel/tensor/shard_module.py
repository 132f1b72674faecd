"""Sharded module: keeps this rank's slices of a module's parameters, in place.

The module's own code then reads sharded values, while parameters() and state_dict() return the
local tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from manyhands.core import Group
from manyhands.parallel.tensor.running_module import named
from manyhands.parallel.tensor.sharding_rules import ShardedValue, TensorAxis
from manyhands.parallel.tensor.undispatched_calls import gather_in_undispatched_calls
from manyhands.replica.deferred.unmade import place, value_of
from manyhands.split.shard_spec import ShardSpec


def apply(
    module: nn.Module, specs: Mapping[str, ShardSpec], group: Group, sequence: bool = False
) -> TensorAxis:
    """Keep this rank's slice of every parameter and buffer that `specs` cuts.

    `specs` has them by their names in the whole model; `module` may be a stage of it."""
    gather_in_undispatched_calls()
    axis = TensorAxis(group, group.rank, group.size, sequence)
    axis.names = named(module)
    cut: set[int] = set()
    for prefix, m in module.named_modules():
        held: dict[str, tuple[int, int, int]] = {}
        for kept in (m._parameters, m._buffers):
            for name, value in kept.items():
                spec = specs.get(f"{prefix}.{name}" if prefix else name)
                if value is None or spec is None or spec.dim is None:
                    continue
                held[name] = spec.dim, spec.shape[spec.dim], spec.groups
                if id(value) not in cut:  # a tied one comes again
                    cut.add(id(value))
                    place(value, spec.extract(value_of(value)))
        if held:
            expose(m, held, axis)
    return axis


def expose(module: nn.Module, held: dict[str, tuple[int, int, int]], axis: TensorAxis) -> None:
    """Have the attributes `held` (dimension, its length, groups) read as sharded values."""
    module.__dict__["_sharded"] = (axis, held)
    module.__class__ = _sharded_class(type(module), tuple(held))  # type: ignore[arg-type]


@cache
def _sharded_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def reads(name: str) -> Any:
        def get(self: nn.Module) -> ShardedValue | None:
            axis, held = self.__dict__["_sharded"]
            local: Tensor | None = self._parameters.get(name)
            local = self._buffers.get(name) if local is None else local
            if local is None:
                return None
            dim, length, groups = held[name]
            return ShardedValue(local, dim, length, axis, groups)

        return property(get)

    return type(
        cls.__name__, (cls,), {name: reads(name) for name in names} | {"__module__": cls.__module__}
    )
