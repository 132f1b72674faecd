"""Parameters of a rank: modules, optimizer, flat buffers, and who updates which part of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.assembly.callbacks.merged_gradients import wants_gradients
from manyhands.assembly.hogwild.common_parameters import (
    check_sparse,
    common_word,
    lay_out_common,
)
from manyhands.assembly.lbfgs.lbfgs_checks import check_lbfgs
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.spec import TrainingSpec
from manyhands.assembly.strategies import replicas_agree, strategies, updates_slices
from manyhands.assembly.tables import RunTables, open_tables
from manyhands.core import Plan
from manyhands.embedding.tables import embeddings
from manyhands.errors import PlanError, TaskError
from manyhands.exchange.compression.topk import TopK
from manyhands.exchange.shared import SharedGroup, shard_memory
from manyhands.parallel.pipeline.step_executor import StepExecutor
from manyhands.parallel.zero.sharded_parameters import ShardedParameters
from manyhands.parallel.zero.sharded_update import ShardUpdate
from manyhands.parallel.zero.sharded_update import check as check_sharded
from manyhands.replica.deferred.unmade import MadeOnRead
from manyhands.replica.flat import FlatParameters
from manyhands.replica.lbfgs.lbfgs import LBFGS
from manyhands.replica.parameters import ReplicaParameters
from manyhands.replica.recompute import recompute
from manyhands.replica.several_optimizers.named_optimizers import (
    members,
    owners,
)
from manyhands.replica.update import (
    SliceUpdate,
    Update,
    WholeUpdate,
    has_sparse_gradients,
    has_step_hooks,
)


@dataclass
class LocalModel:
    """What this rank holds: the whole model or its part of it, its optimizer and its tables."""

    module: nn.Module  # holds all parameters of this rank
    stages: list[nn.Module]  # of a pipeline; else the module alone
    pipeline: StepExecutor | None
    tables: RunTables | None
    optimizer: Optimizer
    flat: ReplicaParameters
    update: Update


def lay_out(context: RankContext, plan: Plan, spec: TrainingSpec) -> LocalModel:
    """Move the model to its device, make its tables and optimizer, lay its parameters out flat."""
    if plan.elastic is not None and spec.task is None:
        raise PlanError(
            f"elastic={plan.elastic}: a process that replaces a dead one must know how far the run "
            "is, and a loop of your own does not; give it as a task()"
        )
    pipeline = None if spec.part is None else spec.part.pipeline
    module = spec.model.to(context.device) if spec.part is None else spec.part.module
    stages = [module] if pipeline is None else pipeline.modules
    if (word := common_word(context, plan, strategies(plan))) and embeddings(module):
        raise PlanError(
            f"{word}: rows of mh.Embedding are on servers, not in the memory that ranks share; use "
            "nn.Embedding(sparse=True), or merge=downpour servers=1"
        )
    tables = open_tables(context, plan, module, spec.ids)
    if plan.recompute and pipeline is None:
        recompute(module)
    # a list: a function that goes through them twice would find a generator empty
    with MadeOnRead(module.parameters()):
        optimizer = spec.make_optimizer(list(module.parameters()))
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"optimizer=(parameters) returned a {type(optimizer).__name__}, but one "
            "torch.optim.Optimizer is needed; a schedule is given as schedule="
        )
    for each in members(optimizer):
        _check_optimizer(context, plan, module, each)
    if isinstance(optimizer, LBFGS):
        check_lbfgs(context, plan, spec, module, optimizer)
    flat, update = _flat(context, plan, module, optimizer, spec)
    _broadcast_rest(context, module)
    return LocalModel(module, stages, pipeline, tables, optimizer, flat, update)


def _check_optimizer(
    context: RankContext, plan: Plan, module: nn.Module, optimizer: Optimizer
) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TaskError(
            "torch.optim.LBFGS evaluates the loss several times a step, each rank by itself, and "
            "cannot be merged over ranks; use mh.LBFGS, whose line search evaluates the batch of "
            "all ranks (in a loop of your own: run.step(closure)), or SGD, Adam, AdamW"
        )
    if context.splits_model and has_step_hooks(optimizer):
        raise TaskError(
            "the optimizer has a hook before or after its step, which would see this rank's part "
            "of the model alone, because shard=, tensor= or pipe= splits it; leave the hook out "
            "(clip=1.0 clips the whole gradient), or use data= alone"
        )
    for axis in ("shard", "tensor"):
        if getattr(plan.layout, axis) > 1:
            check_sharded(optimizer, axis)
    known = {id(p) for p in module.parameters()}
    if strangers := sum(id(p) not in known for g in optimizer.param_groups for p in g["params"]):
        raise TaskError(
            f"{strangers} of the optimizer's parameters are not the model's, so nobody would merge "
            "or save them; make them parameters of the model "
            "(a learnable temperature: self.temperature = nn.Parameter(...))"
        )
    own = plan.codec.momentum if isinstance(plan.codec, TopK) else 0.0
    if own and any(g.get("momentum") for g in optimizer.param_groups):
        raise TaskError(
            f"compress.momentum={own} keeps momentum before compression, and the optimizer has "
            "momentum too: it would count twice; "
            "give the optimizer momentum=0 or set compress.momentum=0"
        )
    if not has_sparse_gradients(module):
        return
    if plan.clip is not None:
        raise TaskError(
            f"clip={plan.clip:g} and an embedding with sparse=True: the norm of sparse gradients "
            "is not known to torch; leave clip out, or set sparse=False"
        )
    if word := common_word(context, plan, strategies(plan)):
        check_sparse(module, word, _only_common(plan))
    elif context.process.size > 1:
        raise TaskError(
            "an embedding with sparse=True gives sparse gradients, which merge strategies cannot "
            "merge; set sparse=False, use mh.Embedding, or merge=hogwild on one host"
        )


def _only_common(plan: Plan) -> bool:
    return all(strategy.shares_parameters for strategy in strategies(plan).values())


def _flat(
    context: RankContext,
    plan: Plan,
    module: nn.Module,
    optimizer: Optimizer,
    spec: TrainingSpec,
) -> tuple[ReplicaParameters, Update]:
    """Flat buffers, and who updates which part of them. Over a shard axis every rank updates its
    slices. On one host, replicas that always agree need only one copy of the parameters, and each
    rank updates its part of it."""
    bucket_bytes = int(plan.bucket_mb * 2**20)
    if plan.layout.shard > 1:
        memory, common = shard_memory(context.axes["shard"], context.device)
        sharded = ShardedParameters(
            module,
            context.axes["shard"],
            plan.zero,
            allocate=memory,
            common=common,
            bucket_bytes=bucket_bytes,
            gather_dtype=torch.bfloat16 if plan.precision == "bf16" else None,
        )
        return sharded, ShardUpdate(sharded, optimizer)
    if word := common_word(context, plan, strategies(plan)):
        own, update = lay_out_common(
            context, word, _only_common(plan), module, optimizer, bucket_bytes
        )
        _broadcast_start(context, own)
        return own, update
    whole = spec.whole_update or wants_gradients(context, spec)
    if whole or not updates_slices(context, plan, replicas_agree(plan), optimizer):
        flat = FlatParameters(module, context.allocate, bucket_bytes, owners=owners(optimizer))
        _broadcast_start(context, flat)
        return flat, WholeUpdate(flat, module, optimizer)
    shared, owned = context.data_group.group, owners(optimizer)
    assert isinstance(shared, SharedGroup)
    if spec.one_copy:
        in_common = functools.partial(shared.allocate, common=True)
        first = shared.rank == 0
        flat = FlatParameters(
            module, shared.allocate, bucket_bytes, in_common, writes=first, owners=owned
        )
        shared.all_gather(flat.values).wait()  # nobody reads before rank 0 has written
    else:
        flat = FlatParameters(module, shared.allocate, bucket_bytes, owners=owned)
        _broadcast_start(context, flat)
    return flat, SliceUpdate(flat, module, optimizer, shared.own)


def _broadcast_start(context: RankContext, flat: FlatParameters) -> None:
    """All replicas start from rank 0's weights, also where a user's script forgot to seed."""
    # equal seeds make equal weights nearly always: comparing sums of bits is cheaper than moving
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    words = [v.view(integers[v.element_size()]) for v in flat.values.values()]
    sums = torch.stack([w[i::2].sum(dtype=torch.int64) for w in words for i in range(2)])
    span = torch.cat([sums, -sums])
    context.data_group.all_reduce({"span": span}, op="max").wait()
    if not torch.equal(span[: len(sums)], -span[len(sums) :]):
        context.data_group.broadcast(flat.values).wait()


def _broadcast_rest(context: RankContext, module: nn.Module) -> None:
    """Frozen parameters and buffers too are rank 0's."""
    frozen = [p.data for p in module.parameters() if not p.requires_grad]
    rest = {str(i): value for i, value in enumerate([*frozen, *module.buffers()])}
    if rest:
        context.data_group.broadcast(rest).wait()
