"""Tensors of which each rank holds a share: the value, and all the rules for it.

`pieced_value` is the value, `pieced_axis` the exchanges with their backward; rules stand by kind in `pieced_ops` (element by
element), `pieced_shape` (views), `pieced_linear` (weights), `pieced_attention` and `pieced_loss`.
"""

from __future__ import annotations

from manyhands.compute import pieced_attention, pieced_linear, pieced_loss, pieced_ops, pieced_shape
from manyhands.compute.pieced_axis import TensorAxis
from manyhands.compute.pieced_value import RULES, Pieced

RULE_FILES = (pieced_attention, pieced_linear, pieced_loss, pieced_ops, pieced_shape)  # importing them is what fills RULES

__all__ = ["RULES", "Pieced", "TensorAxis"]
