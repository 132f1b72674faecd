"""Search setup: gives L-BFGS its dot products over ranks, and the replica its line search.

    a . b = sum over ranks and parameters of  w_p a_p . b_p

Where each rank updates slices of the parameters (replicas on one host, shard=) or holds a part of
the model (pipe=, tensor=), a rank has that slice of gradient, direction and history, and the sum
goes over those ranks; w_p = 1 / how many of them hold the same elements. Replicas that each update
everything (over gloo, nccl and the hierarchical link, whose groups send whole gradients) keep whole
histories; they take rank 0's products, so that no difference of their hardware can lead two ranks
to different steps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.assembly.data import Feed
from manyhands.assembly.lbfgs.lbfgs_checks import check_batch
from manyhands.assembly.parameters import LocalModel
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.spec import TrainingSpec
from manyhands.core import Plan
from manyhands.data.drawn import DrawnSource
from manyhands.data.shard_claims import ShardClaims
from manyhands.quasi_newton import Dot
from manyhands.replica.forward import TaskLoss
from manyhands.replica.lbfgs.balanced_gradient import BalancedGradient
from manyhands.replica.lbfgs.lbfgs import LBFGS
from manyhands.replica.lbfgs.line_search_step import LineSearchStep
from manyhands.replica.module import ModuleReplica, NextLoss
from manyhands.replica.parameters import ReplicaGroup
from manyhands.replica.update import SliceUpdate


def claims_shards(context: RankContext, optimizer: Optimizer) -> bool:
    """Whether ranks claim the micro-batches of a step, so that each knows all of them."""
    return isinstance(optimizer, LBFGS) and optimizer.balance and context.process.size > 1


def balanced_gradient(
    context: RankContext, plan: Plan, model: LocalModel, feed: Feed, loss: NextLoss
) -> BalancedGradient | None:
    """The gradient for which ranks claim shards; None: each computes its part of every batch."""
    if not claims_shards(context, model.optimizer):
        return None
    assert isinstance(loss, TaskLoss) and feed.indexed is not None
    claims = ShardClaims(context.store, context.rank, context.process.size)
    parameters = [view.parameter for view in model.flat.views]
    return BalancedGradient(parameters, loss, feed.indexed, claims, plan.seed or 0)


def set_line_search(
    context: RankContext,
    plan: Plan,
    spec: TrainingSpec,
    model: LocalModel,
    replica: ModuleReplica,
    feed: Feed,
    global_batch: int,
) -> None:
    """Nothing, where the optimizer is another."""
    optimizer, batches = model.optimizer, spec.closures or feed.indexed
    if not isinstance(optimizer, LBFGS):
        return
    assert batches is not None
    balances = claims_shards(context, optimizer)
    if not isinstance(spec.train, DrawnSource):
        check_batch(context, plan, spec.train, global_batch, balances)
    if context.process.size > 1:
        optimizer.dot = dot_over_ranks(context, model, optimizer, replica.replica_group)

    def agree(flag: bool) -> bool:
        refused = torch.tensor([float(not flag)], device=context.device)
        context.group.all_reduce({"agree": refused}, op="max").wait()
        return float(refused) == 0

    balanced = replica.run_micro_batches
    replica.line_search = LineSearchStep(
        replica,
        model.stages,
        batches,
        _complete(plan, spec),
        agree,
        balanced.drew if isinstance(balanced, BalancedGradient) else _never,
    )


def _never() -> bool:
    return False


def _complete(plan: Plan, spec: TrainingSpec) -> int:
    """Samples of a step that has each sample of the data set once, whatever the epoch; 0: none."""
    if spec.closures is not None:
        return 0  # nobody knows what a closure computes
    sampling = spec.train.sampling
    permuted = plan.split in ("shuffled", "ordered") and sampling.own is None
    return (spec.train.samples or 0) if permuted and sampling.batch_sampler is None else 0


def dot_over_ranks(
    context: RankContext, model: LocalModel, optimizer: LBFGS, replica_group: ReplicaGroup | None
) -> Dot:
    update = model.update
    views = {id(view.parameter): i for i, view in enumerate(model.flat.views)}
    if isinstance(update, SliceUpdate):
        views = {id(s.parameter): s.view for s in update.slices}
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    lengths = [p.numel() for p in trained]
    weights = None
    if replica_group is not None:
        weights = [replica_group.weights[views[id(p)]] for p in trained]
    replicas = context.data_group

    def dot(a: Tensor, b: Tensor) -> float:
        if weights is None:
            total = torch.dot(a, b).double().view(1)
        else:
            total = torch.zeros(1, dtype=torch.float64, device=a.device)
            for w, x, y in zip(weights, a.split(lengths), b.split(lengths), strict=True):
                total += w * torch.dot(x, y).double()
        if replica_group is not None:
            replica_group.sum(total)
        if replicas.size > 1 and update.slice_only:
            replicas.all_reduce({"dot": total}).wait()
        elif replicas.size > 1:
            replicas.broadcast({"dot": total}).wait()
        return float(total)

    return dot
