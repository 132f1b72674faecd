"""Assembly of a trainer: a task, a plan and a rank context become one rank's training loop.

task_trainer    a whole task: its data, losses and evaluation
assemble        for a task and for a user's own loop, step by step:
                start -> parameters -> batches -> replica -> strategy -> trainer
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.assembly.callbacks.callback_state import CallbackState
from manyhands.assembly.callbacks.merged_gradients import (
    callbacks_of,
    check_gradient_hooks,
    hook_gradients,
    wants_gradients,
)
from manyhands.assembly.chaos.rank_ledger import ledgers
from manyhands.assembly.checkpointing import Checkpointing
from manyhands.assembly.culprits.round_marks import watching
from manyhands.assembly.data import (
    Feed,
    open_feed,
    shares_steps,
    task_data,
    with_task_defaults,
)
from manyhands.assembly.elastic.notes import join_run, make_note
from manyhands.assembly.evaluation.evaluator import Evaluation
from manyhands.assembly.evaluation.goals import check_goals
from manyhands.assembly.evaluation.rehearsal import rehearse
from manyhands.assembly.hogwild.claimed_parts import set_pace
from manyhands.assembly.hogwild.common_parameters import align_step_counts
from manyhands.assembly.lbfgs.search_setup import claims_shards, set_line_search
from manyhands.assembly.learning_rate.schedule_setup import (
    LearningRate,
    make_schedule,
)
from manyhands.assembly.memory import MemoryWatch, example, watch
from manyhands.assembly.model_parallel import ModelPart, by_feature, divide
from manyhands.assembly.parameters import LocalModel, lay_out
from manyhands.assembly.rank_context import (
    RankContext,
    micro_batches,
    warn_of_eval_mode,
)
from manyhands.assembly.regroup.boundaries import announce_regrouped, follow_epochs
from manyhands.assembly.replica_setup import module_replica, wrapped
from manyhands.assembly.resume import Start, announce, notice_resumed, start
from manyhands.assembly.several_optimizers.compiled_models import compiled
from manyhands.assembly.several_optimizers.named_checks import (
    check_named_task,
    makes_same_steps,
    optimizer_maker,
)
from manyhands.assembly.several_optimizers.task_losses import loss_maker
from manyhands.assembly.spec import TrainingSpec
from manyhands.assembly.strategies import activate, first_word, replicas_agree, strategies
from manyhands.assembly.tables import RunTables
from manyhands.callbacks.stop_request import StopRequest
from manyhands.core import Plan, Store
from manyhands.data.batches import BatchIterator
from manyhands.data.sources import Source, StreamSource
from manyhands.parallel import batchnorm_samples, sync_batchnorm
from manyhands.parallel.tensor.undispatched_calls import skip_in_compilation
from manyhands.replica import state
from manyhands.replica.deferred.unmade import cast
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import ModuleReplica
from manyhands.task import Callback, Task
from manyhands.train import Trainer
from manyhands.trainer_parts import ActiveStrategy, StopFlag, StrategyChange


@dataclass
class Assembled:
    """One rank's trainer, and what a user's own loop needs besides it."""

    trainer: Trainer
    batches: BatchIterator
    module: nn.Module  # what computes: compiled, where the plan says so


# -- a task --


def task_trainer(
    context: RankContext, task: Task, model: nn.Module, seed: int, stop: StopFlag, run: Any
) -> Trainer:
    plan = with_task_defaults(context.plan, task, seed)
    plan = dataclasses.replace(plan, batch=(plan.batch or 1) * context.options.stands_for)
    train, test = task_data(context, plan, task)
    if context.options.float64:
        model = cast(model, torch.float64)
        for source in (train, test):
            if source is not None:
                source.cast(torch.float64)
    check_goals(context, plan, task)
    warn_of_eval_mode(context, model)
    if task.name:
        context.notice(task.name)

    check_named_task(context, plan, task, model)
    plan = _fit_micro(context, plan, model, train, task)
    part, memory = _split_model(context, plan, task, model, train, test)
    spec = TrainingSpec(
        model,
        optimizer_maker(task, model),
        task.schedule,
        train,
        loss_maker(context, plan, task),
        task,
        test,
        task.ids,
        tuple(task.callbacks),
        schedule_by=task.schedule_by,
        part=part,
        watch=memory,
    )
    return assemble(context, plan, spec, stop, run).trainer


def _split_model(
    context: RankContext,
    plan: Plan,
    task: Task,
    model: nn.Module,
    train: Source,
    test: Source | None,
) -> tuple[ModelPart | None, MemoryWatch | None]:
    """This rank's part of a model that is split over ranks, and the memory forecast."""
    if context.splits_model:
        if plan.split == "by_feature":
            sources = [train] if test is None else [train, test]
            part = by_feature(context, model.to(context.device), sources)
        else:
            part = divide(context, plan, model, train, task)  # moves this rank's part
        return part, part.watch
    if train.samples and not isinstance(train, StreamSource) and not plan.servers:
        values = functools.partial(example, context, plan, train)
        return None, watch(context, plan, model, values, task)
    return None, None


def _fit_micro(
    context: RankContext, plan: Plan, model: nn.Module, train: Source, task: Task
) -> Plan:
    """The plan, with fewer micro-batches where BatchNorm would see single samples."""
    sampling = train.sampling
    if isinstance(train, StreamSource) or not train.samples or sampling.batch_sampler is not None:
        return plan
    cut = batchnorm_samples.BatchCut(
        train.samples,
        plan.batch or 1,
        plan.accumulate,
        1 if shares_steps(plan) else context.data_parallel_size,
        _wants_sync(context, plan),
        context.options.stands_for,
    )
    reached = plan.steps is None or plan.steps * cut.total >= train.samples
    # how many samples a sampler of the user's draws is not known before it has drawn
    known = sampling.own is None and not sampling.drop_last
    cut = dataclasses.replace(cut, last=reached and known)
    most, rounds_of = micro_batches(plan), 1
    if plan.schedule == "interleaved":
        rounds_of = plan.layout.pipe
    needs_two = functools.partial(batchnorm_samples.needs_two, model, train, task.step)
    micro, name = batchnorm_samples.fitting_micro(
        cut, most, rounds_of, plan.micro is not None, needs_two
    )
    if not name:
        return plan
    # batches are cut by the context's plan, stages by the trainer's
    context.plan = dataclasses.replace(context.plan, micro=micro)
    context.notice(f"micro={micro}, not {most}: else BatchNorm {name} would see single samples")
    return dataclasses.replace(plan, micro=micro)


# -- a task or a user's own loop --


def assemble(
    context: RankContext, plan: Plan, spec: TrainingSpec, stop: StopFlag, run: Any
) -> Assembled:
    """Put one rank's parts together; resume if asked."""
    begin, stop = start(context, plan, spec.train), StopRequest(stop)
    plan = begin.plan
    check_gradient_hooks(context, plan, spec)
    model = lay_out(context, plan, spec)
    state.seed_everything(begin.seed, context.rng_stream)
    synced = _syncs_batchnorm(context, plan, model)
    borrow = synced or context.gathers_parameters or makes_same_steps(plan, spec)
    whole = claims_shards(context, model.optimizer)
    at, global_batch = begin.position, begin.global_batch
    feed = open_feed(context, plan, spec.train, global_batch, at, model.tables, borrow, whole)
    if synced:
        _synchronise_batchnorm(context, model, feed.batches)
    if plan.compile and plan.layout.tensor > 1:
        skip_in_compilation()
    context.to_close += [batchnorm_samples.refuse_single(m, spec.model) for m in model.stages]
    module = compiled(model.module) if plan.compile else model.module
    next_loss = spec.make_loss(module, feed.batches)
    rate = make_schedule(context, begin, spec, model.optimizer, feed)
    plain = module_replica(context, begin, spec, model, feed, next_loss, synced, stop, rate)
    set_line_search(context, plan, spec, model, plain, feed, begin.global_batch)
    context.to_close += [feed.batches.close, plain.close]
    checkpointing = _checkpointing(context, begin, spec, model, plain, feed.batches, rate)
    hooked = wants_gradients(context, spec)
    replica = wrapped(context, plan, plain, model, next_loss, spec.train, feed.batches, hooked)
    word = first_word(plan, begin.saved)
    if (regrouping := context.regrouping) is not None and regrouping.begin is not None:
        word = regrouping.begin.meta["word"]
    active = activate(context, plan, replica.known, word, model.tables, begin.saved, checkpointing)
    set_pace(context, plan, active, feed, plain)
    notice_resumed(context, begin)
    evaluation = _evaluation(context, plan, spec, model, module, synced)
    if spec.watch is not None:
        spec.watch.begin(model.module, model.optimizer, model.flat, active.state)
    trainer = Trainer(
        context,
        active,
        replica.replica,
        feed.limits,
        evaluation,
        checkpointing,
        stop,
        plan.until,
        change=_change(context, plan, replica.known, word, model.tables, feed, plain),
        tables=model.tables,
        around_round=_around_round(context, spec),
        callbacks=_all_callbacks(context, spec, feed, model, rate),
        run=run,
        shown=checkpointing.kept.shown,
        round=0 if begin.saved is None else begin.saved.round,
        metrics={} if begin.saved is None else dict(begin.saved.meta["metrics"]),
    )
    if hooked:
        hook_gradients(trainer, plain)
    if not _joins_others(context, trainer, checkpointing, model):
        announce(context, plan, model.module, begin.global_batch, spec)
    return Assembled(trainer, feed.batches, module)


def _joins_others(
    context: RankContext, trainer: Trainer, checkpointing: Checkpointing, model: LocalModel
) -> bool:
    """Whether this trainer goes on where a run under way is, of which others have told."""
    if model.tables is not None and (leases := model.tables.leases) is not None:
        buffers = sync_batchnorm.running_buffers(model.module)
        kept = checkpointing.kept
        leases.make_note = functools.partial(make_note, trainer, buffers, kept)
        if context.replaces:
            join_run(context, trainer, checkpointing.replica, leases, buffers, kept)
        return context.replaces
    regrouping = context.regrouping
    if regrouping is None or not follow_epochs(trainer, checkpointing, regrouping):
        return False
    announce_regrouped(context, trainer.round)
    return True


# -- the steps --


def _syncs_batchnorm(context: RankContext, plan: Plan, model: LocalModel) -> bool:
    """Whether BatchNorm takes its statistics over the union of all ranks' batches."""
    return _wants_sync(context, plan) and any(
        sync_batchnorm.has_batchnorm(stage) for stage in model.stages
    )


def _wants_sync(context: RankContext, plan: Plan) -> bool:
    # local steps are not held up by other ranks' statistics
    wanted = plan.batchnorm == "sync" or (plan.batchnorm == "auto" and replicas_agree(plan))
    return context.data_parallel_size > 1 and wanted


def _synchronise_batchnorm(context: RankContext, model: LocalModel, batches: BatchIterator) -> None:
    def reduce(values: Tensor) -> None:
        context.sum_over_data({"batchnorm": values})

    def counts() -> bool:
        # a pipeline draws all micro-batches of a step before it computes the first
        return batches.counts if model.pipeline is None else model.pipeline.counts

    model.stages = [sync_batchnorm.synchronise(m, reduce, counts) for m in model.stages]
    if model.pipeline is None:
        (model.module,) = model.stages


def _checkpointing(
    context: RankContext,
    begin: Start,
    spec: TrainingSpec,
    model: LocalModel,
    replica: ModuleReplica,
    batches: BatchIterator,
    rate: LearningRate,
) -> Checkpointing:
    """Checkpoints of this rank; the model, its optimizer and its tables are restored."""
    plan, saved, part = begin.plan, begin.saved, spec.part
    resharding, local = None, None
    if part is not None:
        held = part.rank_state(context, model.module, model.flat, model.update)
        resharding, local = held or (None, None)
    checkpointing = Checkpointing(
        context,
        plan,
        model.module,
        replica,
        batches,
        begin.global_batch,
        begin.order,
        model.tables,
        resharding,
        local,
        kept=CallbackState(callbacks_of(context, spec)),
        total_steps=rate.total,
    )
    if saved is not None:
        word = first_word(plan, saved)
        agree = strategies(plan)[word].replicas_agree
        checkpointing.restore(saved, str(getattr(plan, word)), agree)
    if model.tables is not None and plan.strategy.link is Store:
        assert isinstance(model.flat, FlatParameters)  # of a whole model
        values = checkpointing.consensus or model.flat.values
        model.tables.create_dense(plan.strategy, model.flat, values, model.optimizer, saved)
    return checkpointing


def _all_callbacks(
    context: RankContext, spec: TrainingSpec, feed: Feed, model: LocalModel, rate: LearningRate
) -> tuple[Callback, ...]:
    """The user's, and our own around them."""
    return (
        *watching(context, spec, feed),
        *rate.by_metric(),
        *spec.callbacks,
        *filter(None, [spec.watch]),
        *context.options.callbacks,
        *ledgers(context, feed, None if model.tables is None else model.tables.store),
    )


def _evaluation(
    context: RankContext,
    plan: Plan,
    spec: TrainingSpec,
    model: LocalModel,
    module: nn.Module,
    synced: bool,
) -> Evaluation:
    stages = None if model.pipeline is None else nn.ModuleList(model.stages)
    infer = None if model.pipeline is None else model.pipeline.infer
    buffers = [] if synced else sync_batchnorm.running_buffers(model.module)
    computes = module if stages is None else stages
    evaluation = Evaluation(context, plan, computes, spec.task, spec.test, infer, buffers)
    regroups = context.regrouping is not None and context.regrouping.begin is not None
    if not context.replaces and not regroups:  # else the run has begun
        rehearse(evaluation, model.module if stages is None else stages)
    return evaluation


def _around_round(context: RankContext, spec: TrainingSpec) -> AbstractContextManager[Any]:
    if context.options.around_round is not None:
        return context.options.around_round
    return nullcontext() if spec.watch is None else spec.watch.measured()


def _change(
    context: RankContext,
    plan: Plan,
    replica: Any,
    word: str,
    tables: RunTables | None,
    feed: Feed,
    plain: ModuleReplica,
) -> StrategyChange | None:
    """The strategy that the run changes to, where that is still to come."""
    if plan.then is None or word == "then":
        return None

    def make() -> ActiveStrategy:
        if strategies(plan)["then"].replicas_agree:  # also where one had samples less often
            align_step_counts(context, plain.flat, plain.optimizer)
        active = activate(context, plan, replica, "then", tables)
        return set_pace(context, plan, active, feed, plain)

    assert plan.at is not None
    return StrategyChange(plan.at, make)
