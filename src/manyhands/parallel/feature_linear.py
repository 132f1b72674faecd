"""Linear layer split by columns (split=by_feature): ranks score their columns; scores are summed.

forward    s = sum_k X_k W_k' + b       one all-reduce of (samples, outputs)
backward   ds is the same on every rank, so dW_k = ds' X_k needs no exchange
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import TaskError
from manyhands.split.shard_spec import ShardSpec

Reduce = Callable[[Tensor], None]  # sum over ranks, in place


def first(module: nn.Module, total: int) -> str:
    """The name of the weight that reads the model's input of `total` columns."""
    linears = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    if not linears or linears[0][1].in_features != total:
        given = (
            "has no nn.Linear"
            if not linears
            else f"begins with {linears[0][0] or 'one'}: {linears[0][1].in_features} columns"
        )
        raise TaskError(
            f"split=by_feature needs a model that begins with nn.Linear({total}, ...), as the data "
            f"has {total} columns; it {given}"
        )
    name, linear = linears[0]
    if sum(p is linear.weight for _, p in module.named_parameters(remove_duplicate=False)) > 1:
        raise TaskError(
            f"split=by_feature cuts {name}.weight by columns, but another layer has the same "
            "weight; untie them"
        )
    return f"{name}.weight" if name else "weight"


def apply(module: nn.Module, weight: str, spec: ShardSpec, reduce: Reduce) -> None:
    """Keep this rank's columns of `weight` (a name as `first` returns it), in place.

    From here on the model takes only those columns as its input."""
    linear = module.get_submodule(weight.rpartition(".")[0])
    assert isinstance(linear, nn.Linear)
    linear.weight.data = spec.extract(linear.weight.data)
    linear.in_features = linear.weight.shape[1]
    linear.__dict__["_reduce"], linear.__dict__["_given"] = reduce, None
    linear.__class__ = SummedLinear

    def remember(model: nn.Module, inputs: tuple[Any, ...]) -> None:
        linear.__dict__["_given"] = inputs[0]

    if linear is not module:
        module.register_forward_pre_hook(remember)


class SummedLinear(nn.Linear):
    """Linear layer on this rank's columns: it sums scores over ranks and adds the bias once."""

    def forward(self, input: Tensor) -> Tensor:
        given = self.__dict__["_given"]
        if given is not None:
            self.__dict__["_given"] = None
            if given.data_ptr() != input.data_ptr() or given.numel() != input.numel():
                raise TaskError(
                    "split=by_feature: the model changes its input before its first nn.Linear, but "
                    "a rank has only some of the columns; do it to the data, or leave split out"
                )
        scores = _Sum.apply(nn.functional.linear(input, self.weight), self.__dict__["_reduce"])
        return scores if self.bias is None else scores + self.bias.to(scores.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, reduce: Reduce) -> Tensor:
        # short types are summed in float32
        wide = partial.to(torch.promote_types(partial.dtype, torch.float32), copy=True)
        reduce(wide)
        return wide.to(partial.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None
