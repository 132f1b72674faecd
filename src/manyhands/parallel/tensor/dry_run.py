"""Dry run: a forward pass on a copy of the model, without a group, to see what can be cut.

It runs on fake tensors (device "meta"), or on real ones where those are few: that is faster, and a
model may then depend on its values. `dry_run_mode` makes the decisions, `split.tensor` repeats dry
runs until no cut fails.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from manyhands.errors import PlanError
from manyhands.parallel.tensor.dry_run_failure import note_exception, note_kept_values
from manyhands.parallel.tensor.dry_run_mode import DryRunMode, flat_values
from manyhands.parallel.tensor.undispatched_calls import gather_in_undispatched_calls
from manyhands.replica.deferred.unmade import value_of
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
        trouble: dict[str, tuple[Exception, DryRunMode]] = {}
        for device in devices:  # a model that depends on its values needs real ones
            copied = _copy(module, device)
            inputs, goal = tree_map(
                lambda v, to=device: v.detach().to(to) if isinstance(v, Tensor) else v,
                (tuple(example), target),
            )
            mode = DryRunMode(copied, size, replicated, blocks, requested, sequence)
            try:
                with torch.random.fork_rng(devices=[]), torch.enable_grad(), _uncompiled(), mode:
                    out = copied(*inputs) if call is None else call(copied, *inputs)
                    if loss is not None:
                        loss(out, goal)
                note_kept_values(mode)
                return mode.result
            except PlanError:
                raise
            except Exception as e:
                trouble[device] = e, mode
        # fake tensors have troubles of their own: the real ones say what is wrong
        note_exception(*trouble["cpu"])
        return trouble["cpu"][1].result

    gather_in_undispatched_calls()
    return dry_run


def _uncompiled() -> AbstractContextManager[Any]:
    """Runs what torch.compile has compiled as it is written: a dry run must see its functions."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and loading it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _copy(module: nn.Module, device: str) -> nn.Module:
    def copied(t: Tensor) -> Tensor:
        if device == "meta":
            return torch.empty_like(t, device=device)
        return value_of(t).detach().to(device, copy=True)

    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(copied(p), requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = copied(b)
    return copy.deepcopy(module, memo)
