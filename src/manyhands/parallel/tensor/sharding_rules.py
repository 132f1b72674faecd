"""Sharding rules of all operators: importing this module registers them.

`sharded_value` is the value, `collectives` the exchanges with their backward passes. The rules are
in one module per kind of operator: `elementwise`, `views`, `linear` (layers with weights),
`einsum`, `attention`, `loss`, `attributes`.
"""

from __future__ import annotations

from manyhands.parallel.tensor import (
    attention,
    attributes,
    einsum,
    elementwise,
    linear,
    loss,
    views,
)
from manyhands.parallel.tensor.sharded_value import SHARDING_RULES, ShardedValue
from manyhands.parallel.tensor.tensor_axis import TensorAxis

# importing them fills SHARDING_RULES
RULE_MODULES = (attention, attributes, einsum, linear, loss, elementwise, views)

__all__ = ["SHARDING_RULES", "ShardedValue", "TensorAxis"]
