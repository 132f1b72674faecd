"""Common parameters: one vector that all ranks of a host step, in memory that they share.

Parameters are laid out in each rank's own memory. When a strategy with `shares_parameters` begins,
rank 0's values are copied into common memory and every rank's parameters become views of it; when
another strategy follows, each rank takes its own copy again. Optimizer state is each rank's own at
all times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Plan, Strategy
from manyhands.errors import PlanError, TaskError
from manyhands.exchange.shared import SharedGroup
from manyhands.exchange.wrapper import unwrapped
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import ModuleReplica
from manyhands.replica.parameters import ReplicaParameters
from manyhands.replica.row_gradients import RowGradients, check_rows
from manyhands.replica.update import WholeUpdate, has_sparse_gradients
from manyhands.replica.wrapper import ReplicaWrapper

Strategies = Mapping[str, Strategy[Any, Any]]  # of a run, by plan word


def in_common(context: RankContext, strategy: Strategy[Any, Any]) -> bool:
    """Whether the ranks of this run have their parameters in common under a strategy."""
    return strategy.shares_parameters and context.data_group.size > 1


def common_word(context: RankContext, plan: Plan, used: Strategies) -> str:
    """The word that gives ranks of this run common parameters at some time; "": none does."""
    words = [w for w, strategy in used.items() if in_common(context, strategy)]
    return f"{words[0]}={getattr(plan, words[0])}" if words else ""


def lay_out_common(
    context: RankContext,
    word: str,
    only: bool,
    module: nn.Module,
    optimizer: Optimizer,
    bucket_bytes: int,
) -> tuple[FlatParameters, WholeUpdate]:
    """Flat buffers of this rank's own, to be moved when the strategy begins. `only`: no other
    strategy needs gradients where the group reduces them without a copy."""
    check_shared_memory(context, word)
    check_rows(optimizer, module)
    flat = FlatParameters(module, _private if only else context.allocate, bucket_bytes)
    update = WholeUpdate(flat, module, optimizer)
    context.to_close.append(RowGradients(flat, optimizer).close)
    return flat, update


def check_shared_memory(context: RankContext, word: str) -> SharedGroup:
    """The group over shared memory of this run; refuses ranks that have none in common."""
    group = unwrapped(context.data_group)
    if context.device.type != "cpu":
        raise PlanError(
            f"{word}: ranks step one parameter vector in the memory of their host, but this rank "
            "computes on a GPU; set device=cpu, or use merge=all_reduce"
        )
    if not isinstance(group, SharedGroup):
        raise PlanError(
            f"{word}: ranks step one parameter vector in shared memory of one host, but these are "
            f"connected by {context.group_name}; start them all on one host and leave link= out, "
            "or use merge=downpour servers=1"
        )
    return group


def check_sparse(module: nn.Module, word: str, only: bool) -> None:
    """Sparse gradients are never merged under `word`; another strategy would have to."""
    if has_sparse_gradients(module) and not only:
        raise TaskError(
            "an embedding with sparse=True gives sparse gradients, which only merge=hogwild leaves "
            f"as they are, and the plan has another strategy beside {word}; set sparse=False, or "
            "leave then= out"
        )


def place_parameters(
    context: RankContext, strategy: Strategy[Any, Any], replica: ModuleReplica | ReplicaWrapper
) -> None:
    """Move the parameters to where `strategy` has them; all ranks call it at a sync point."""
    wanted, flat = in_common(context, strategy), replica.flat
    if wanted == flat.in_common or not isinstance(flat, FlatParameters):
        return
    if not wanted:
        plain = replica.module_replica if isinstance(replica, ReplicaWrapper) else replica
        align_step_counts(context, flat, plain.optimizer)
    shared = check_shared_memory(context, "hogwild") if wanted else None
    moved = {}
    for key, values in flat.values.items():
        if shared is None:
            moved[key] = context.allocate(values.numel(), values.dtype)
            moved[key].copy_(values)
        else:
            moved[key] = shared.allocate(values.numel(), values.dtype, common=True)
            if shared.rank == 0:
                moved[key].copy_(values)
    flat.move(moved, in_common=wanted)
    context.data_group.barrier()  # nobody reads before rank 0 has written, or writes before a read


def align_step_counts(context: RankContext, flat: ReplicaParameters, optimizer: Optimizer) -> None:
    """Ranks that claimed their steps, or had no samples for some, have made different numbers of
    them; the optimizers of replicas that agree count alike, as Adam's bias correction depends on
    it."""
    entries = [optimizer.state.get(view.parameter, {}) for view in flat.views]
    steps = torch.tensor([float(e.get("step", 0)) for e in entries], dtype=torch.float64)
    context.data_group.all_reduce({"steps": steps}, op="max").wait()
    for entry, step in zip(entries, steps.tolist(), strict=True):
        if "step" in entry:
            found = entry["step"]
            entry["step"] = torch.full_like(found, step) if isinstance(found, Tensor) else int(step)


def _private(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)
