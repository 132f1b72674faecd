"""Where a rank's parameters live, who updates what of them, and that all ranks start from the same."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Plan
from manyhands.exchange.shared import SharedGroup, shard_memory
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.replica.flat import FlatParameters
from manyhands.replica.parameters import ReplicaParameters
from manyhands.replica.update import (
    PartUpdate,
    Update,
    WholeUpdate,
    can_part,
)


def lay_out(
    context: RankContext,
    plan: Plan,
    agree: bool,
    module: nn.Module,
    optimizer: Optimizer,
    one_copy: bool,
) -> tuple[ReplicaParameters, Update]:
    """Lay the parameters out and decide who updates what: over a shard axis, every rank its slices. On one host, replicas that
    always agree need only one copy of the parameters, and each rank updates its part of it."""
    bucket_bytes = int(plan.bucket_mb * 2**20)
    if plan.layout.shard > 1:
        memory, common = shard_memory(context.axes["shard"], context.device)
        short = torch.bfloat16 if plan.precision == "bf16" else None
        spread = ShardedParameters(
            module,
            context.axes["shard"],
            plan.zero,
            allocate=memory,
            common=common,
            bucket_bytes=bucket_bytes,
            gather_dtype=short,
        )
        return spread, ShardUpdate(spread, optimizer)
    if not updates_parts(context, plan, agree, optimizer):
        flat = FlatParameters(module, context.allocate, bucket_bytes)
        _same_start(context, flat)
        return flat, WholeUpdate(flat, module, optimizer)
    shared = context.merging.group
    assert isinstance(shared, SharedGroup)
    if one_copy:
        common = functools.partial(shared.allocate, common=True)
        flat = FlatParameters(
            module, shared.allocate, bucket_bytes, allocate_values=common, writes=shared.rank == 0
        )
        shared.all_gather(flat.values).wait()  # nobody reads before rank 0 has written
    else:
        flat = FlatParameters(module, shared.allocate, bucket_bytes)
        _same_start(context, flat)
    return flat, PartUpdate(flat, module, optimizer, shared.own)


def updates_parts(context: RankContext, plan: Plan, agree: bool, optimizer: Optimizer) -> bool:
    """Whether replicas have one copy of the parameters, of which each updates its part."""
    plain_link = (
        plan.codec is None and plan.algorithm == "native"
    )  # only that one reduces in two halves
    agree = agree and plain_link and plan.precision != "fp16" and plan.layout.shard == 1
    return isinstance(context.merging.group, SharedGroup) and agree and can_part(optimizer)


def _same_start(context: RankContext, flat: FlatParameters) -> None:
    """Everybody starts from rank 0's weights, also where a user's script forgot to seed."""
    # equal seeds make equal weights nearly always: compare sums of bits first, which spares mapping the peers' memory
    words = [
        v.view(
            torch.int64
            if v.element_size() == 8
            else torch.int32
            if v.element_size() == 4
            else torch.int16
        )
        for v in flat.values.values()
    ]
    sums = torch.stack([w[i::2].sum(dtype=torch.int64) for w in words for i in range(2)])
    span = torch.cat([sums, -sums])
    context.merging.all_reduce({"span": span}, op="max").wait()
    if torch.equal(span[: len(sums)], -span[len(sums) :]):
        return
    if context.merging.rank != 0:
        for values in flat.values.values():
            values.zero_()
    context.merging.all_reduce(flat.values).wait()


def same_rest(context: RankContext, module: nn.Module) -> None:
    """Frozen parameters and buffers too are rank 0's, where a script forgot to seed."""
    rest = [*(p.data for p in module.parameters() if not p.requires_grad), *module.buffers()]
    if context.merging.rank != 0:
        for value in rest:
            value.zero_()
    if rest:
        context.merging.all_reduce({str(i): value for i, value in enumerate(rest)}).wait()
