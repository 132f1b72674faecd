"""Sharding rules of all operators: importing this module registers them.

`sharded_value` is the value, `collectives` the exchanges with their backward passes. Sharding rules stand by kind of
operator: `elementwise`, `views`, `linear` (layers with weights), `attention`, `loss`.
"""

from __future__ import annotations

from manyhands.parallel.tensor import attention, elementwise, linear, loss, views
from manyhands.parallel.tensor.collectives import TensorAxis
from manyhands.parallel.tensor.sharded_value import RULES, ShardedValue

RULE_FILES = (attention, linear, loss, elementwise, views)  # importing them is what fills RULES

__all__ = ["RULES", "ShardedValue", "TensorAxis"]
