"""Merge strategies of a run: the first and the one it changes to, each with group and state."""

from __future__ import annotations

from typing import Any, cast

from torch.optim import Optimizer

from manyhands.assembly.checkpointing import Checkpointing
from manyhands.assembly.hogwild.common_parameters import place_parameters
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.tables import RunTables
from manyhands.core import Group, Plan, Snapshot, Store, Strategy
from manyhands.errors import PlanError
from manyhands.exchange import algorithms, compression
from manyhands.exchange.noise_scale import NoiseGauge
from manyhands.exchange.shared import SharedGroup
from manyhands.replica.module import ModuleReplica
from manyhands.replica.update import can_slice
from manyhands.replica.wrapper import ReplicaWrapper
from manyhands.server.device_store import DeviceStore
from manyhands.trainer_parts import ActiveStrategy


def strategies(plan: Plan) -> dict[str, Strategy[Any, Any]]:
    """By plan word: the strategy of the start, and the one that the run changes to."""
    later = {} if plan.next_strategy is None else {"then": plan.next_strategy}
    return {"merge": plan.strategy, **later}


def replicas_agree(plan: Plan) -> bool:
    """Whether replicas hold the same parameters between any two rounds of the run."""
    return all(strategy.replicas_agree for strategy in strategies(plan).values())


def updates_slices(context: RankContext, plan: Plan, agree: bool, optimizer: Optimizer) -> bool:
    """Whether replicas share one copy of the parameters, of which each updates a part."""
    # only the plain shared-memory group reduces in two phases
    plain = plan.codec is None and plan.algorithm == "native"
    agree = agree and plain and plan.precision != "fp16" and plan.layout.shard == 1
    return isinstance(context.data_group.group, SharedGroup) and agree and can_slice(optimizer)


def first_word(plan: Plan, saved: Snapshot | None) -> str:
    """`merge`; or `then`, where a resumed run has changed its strategy already."""
    meta = {} if saved is None else saved.meta
    changed = meta.get("word") == "then" and meta.get("strategy") == plan.then
    return "then" if changed else "merge"


def activate(
    context: RankContext,
    plan: Plan,
    replica: ModuleReplica | ReplicaWrapper,
    word: str,
    tables: RunTables | None = None,
    saved: Snapshot | None = None,
    checkpointing: Checkpointing | None = None,
) -> ActiveStrategy:
    """The strategy of a plan word, ready to work: over servers, or over the replicas' group behind
    the plan's algorithm and compression; its state is new, or restored from a snapshot."""
    strategy, name = strategies(plan)[word], str(getattr(plan, word))
    if strategy.link is Store:
        assert tables is not None
        on_gpu = context.device.type == "cuda"
        store = DeviceStore(tables.store, context.device) if on_gpu else tables.store
        active = ActiveStrategy(word, name, strategy, cast(Store, store), strategy.init(replica))
        if saved is not None and checkpointing is not None:
            checkpointing.restore_strategy(saved, active)
        return active
    place_parameters(context, strategy, replica)
    group: Group = context.data_group
    if plan.algorithm != "native" and group.size > 1:
        if context.device.type == "cuda":
            raise PlanError(
                f"algorithm={plan.algorithm} is for CPU processes, but this rank computes on a "
                "GPU; leave it out"
            )
        group = algorithms.wrap(group, plan.algorithm)
    compressed = None
    if plan.codec is not None and group.size > 1:
        group = compressed = compression.wrap(
            group, plan.codec, strategy.sends, replica.flat.shapes()
        )
        for values in replica.params.values():
            compressed.warm(values)
    noise = None
    merges_gradients = strategy.sends == "gradients" and not strategy.swaps
    if merges_gradients and group.size > 1 and not context.splits_model:
        buckets = [b.name for b in replica.flat.buckets]
        group = noise = NoiseGauge(group, buckets, lambda: context.group.round, context.device)
    active = ActiveStrategy(word, name, strategy, group, strategy.init(replica), noise)
    if compressed is not None:
        active.codec_state = lambda: compressed.state
        active.load_codec_state = compressed.load_state
    if saved is not None and checkpointing is not None:
        codec_state = checkpointing.restore_strategy(saved, active)
        if compressed is not None:
            compressed.load_state(codec_state)
        elif any(key.startswith("error/") for key in codec_state):
            context.notice(
                "the error feedback in the checkpoint is dropped: this run sends nothing "
                "compressed, so what compression had not sent yet stays unsent"
            )
    return active
