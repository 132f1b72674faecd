"""Dry run: a forward pass on a copy of the model, without a group, to see what can be cut.

It runs on fake tensors (device "meta"), or on real ones where those are few: that is faster, and a
model may then depend on its values. `dry_run_mode` makes the decisions, `split.tensor` repeats dry
runs until no cut fails.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from manyhands.errors import PlanError, TaskError
from manyhands.parallel.tensor.dry_run_mode import DryRunMode, flat_values
from manyhands.parallel.tensor.sharding_rules import ShardedValue
from manyhands.split.tensor import DryRun, DryRunResult

# multiplications, and parameters, up to which a dry run on real numbers is the quicker one
REAL_WORK, REAL_NUMEL = 4e9, 2e7


def prepare_dry_run(
    module: nn.Module,
    example: Sequence[Any],
    size: int,
    loss: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    sequence: bool = False,
    call: Callable[..., Any] | None = None,
) -> DryRun:
    """A function that dry-runs `module(*example)`, or `call(module, *example)`, over `size` ranks.

    `loss`, if given, is applied to what the model returns and `target`."""
    numel = sum(p.numel() for p in module.parameters())
    work = numel * max(
        (v.numel() for v in flat_values(list(example)) if isinstance(v, Tensor)), default=1
    )
    few = work < REAL_WORK and numel < REAL_NUMEL
    devices = ("cpu", "meta") if few else ("meta", "cpu")

    def dry_run(
        replicated: Mapping[str, str], blocks: Mapping[str, int], requested: Mapping[str, str]
    ) -> DryRunResult:
        trouble: Exception | None = None
        for device in devices:  # a model that depends on its values needs real ones
            copied = _copy(module, device)
            inputs, goal = tree_map(
                lambda v, to=device: v.detach().to(to) if isinstance(v, Tensor) else v,
                (tuple(example), target),
            )
            mode = DryRunMode(copied, size, replicated, blocks, requested, sequence)
            try:
                with (
                    torch.random.fork_rng(devices=[]),
                    torch.enable_grad(),
                    mode,
                    _autograd_functions_gather(),
                ):
                    out = copied(*inputs) if call is None else call(copied, *inputs)
                    if loss is not None:
                        loss(out, goal)
                return mode.result
            except PlanError:
                raise
            except Exception as e:
                trouble = trouble or e
        raise TaskError(
            "the model does not run on an example of its data, so "
            f"tensor={size} cannot be derived: {trouble}"
        ) from trouble

    return dry_run


@contextmanager
def _autograd_functions_gather() -> Iterator[None]:
    """Gather sharded values that go into an autograd.Function, and note it.

    An autograd.Function does not dispatch on its arguments: what it returns would have no
    gradient."""
    apply = torch.autograd.Function.__dict__["apply"]

    def gathering(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for v in args:
            if isinstance(v, ShardedValue):
                v.axis.had_to_gather(f"{cls.__name__}.apply", v)
        return apply.__get__(None, cls)(
            *(v.gather() if isinstance(v, ShardedValue) else v for v in args), **kwargs
        )

    patched: Any = classmethod(gathering)
    torch.autograd.Function.apply = patched  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def _copy(module: nn.Module, device: str) -> nn.Module:
    def copied(t: Tensor) -> Tensor:
        if device == "meta":
            return torch.empty_like(t, device=device)
        return t.detach().to(device, copy=True)

    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(copied(p), requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = copied(b)
    return copy.deepcopy(module, memo)
