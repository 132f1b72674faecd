"""Sharding rules of all operators: importing this module registers them.

`sharded_value` is the value, `collectives` the exchanges with their backward passes. The rules are
in one module per kind of operator: `elementwise`, `views`, `linear` (layers with weights),
`attention`, `loss`.
"""

from __future__ import annotations

from manyhands.parallel.tensor import attention, elementwise, linear, loss, views
from manyhands.parallel.tensor.sharded_value import SHARDING_RULES, ShardedValue
from manyhands.parallel.tensor.tensor_axis import TensorAxis

RULE_MODULES = (attention, linear, loss, elementwise, views)  # importing them fills SHARDING_RULES

__all__ = ["SHARDING_RULES", "ShardedValue", "TensorAxis"]
