"""The composition root: a task, a plan and a site become a replica and a trainer. Knows every room, decides nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from manyhands.assembly.checkpointing import Checkpointing, found
from manyhands.assembly.data import (
    DEFAULT_BATCH,
    batch_sizes,
    draw,
    shares_steps,
)
from manyhands.assembly.memory import MemoryWatch, example, watch
from manyhands.assembly.parameters import lay_out, same_rest
from manyhands.assembly.rank_context import RankContext
from manyhands.assembly.tables import RunTables, open_serving
from manyhands.core import (
    Event,
    Group,
    Plan,
    Position,
    Snapshot,
    Store,
    Strategy,
)
from manyhands.data.batches import BatchIterator, IndexedBatches
from manyhands.data.prefetch import PrefetchedBatches
from manyhands.data.sources import DatasetSource, Source, StreamSource, TensorSource, source
from manyhands.errors import PlanError, TaskError
from manyhands.exchange import algorithms, compression
from manyhands.exchange.noise_scale import NoiseGauge
from manyhands.parallel import sync_batchnorm
from manyhands.parallel.zero.sharded_update import check as check_sharded
from manyhands.plan import words
from manyhands.recover.checkpoint import Checkpoints
from manyhands.replica import forward, state
from manyhands.replica.captured import CapturedReplica
from manyhands.replica.distillation import student
from manyhands.replica.flat import FlatParameters
from manyhands.replica.module import ModuleReplica, NextLoss
from manyhands.replica.recompute import recompute
from manyhands.replica.thinned import thinned
from manyhands.replica.update import has_sparse_gradients
from manyhands.server.device_store import DeviceStore
from manyhands.task import Callback, Task
from manyhands.train import Trainer
from manyhands.trainer_parts import ActiveStrategy

if TYPE_CHECKING:
    from manyhands.assembly.model_parallel import ModelPart

OF_THE_RUN = ("epoch", "step", "noise")  # what a goal may name besides the task's metrics


# -- a task --


def task_trainer(
    context: RankContext,
    task: Task,
    model: nn.Module,
    seed: int,
    stop_requested: Callable[[], int],
    run: Any,
) -> Trainer:
    limits_given = context.plan.epochs is not None or context.plan.steps is not None
    plan = dataclasses.replace(
        context.plan,
        seed=seed,
        epochs=context.plan.epochs if limits_given or task.steps else task.epochs,
        steps=context.plan.steps if limits_given else task.steps,
        clip=context.plan.clip if context.plan.clip is not None else task.clip,
        batch=(context.plan.batch or task.batch or loader_batch(task.train) or DEFAULT_BATCH)
        * context.options.stands_for,
    )
    if isinstance(task.train, DataLoader) and not isinstance(
        task.train.sampler, RandomSampler | SequentialSampler
    ):
        context.notice(
            f"the order comes from split={plan.split}: the DataLoader's own {type(task.train.sampler).__name__} is not used"
        )
    train = source(task.train, context.device, "Task.train", plan.loaders)
    test = (
        None if task.test is None else source(task.test, context.device, "Task.test", plan.loaders)
    )
    if plan.loaders and not isinstance(train, DatasetSource):
        raise PlanError(
            f"loaders={plan.loaders} has no effect: the training data is in memory already or a stream; leave it out"
        )
    if context.options.float64:
        model = model.double()
        for given in (train, test):
            if given is not None:
                given.cast(torch.float64)
    has = ["loss", *task.metrics] if test is not None else []
    goals = {
        "best": plan.best and plan.best.lstrip("-"),
        "until": plan.until and plan.until.name,
        "at": plan.at and plan.at.name,
    }
    for key, name in goals.items():
        if name is not None and name not in [*has, *(() if key == "best" else OF_THE_RUN)]:
            raise PlanError(
                f"{key}={getattr(plan, key)}: no such metric; the task has {', '.join(has) or 'no test data'}"
            )

    if task.name:
        context.notice(task.name)

    def losses(module: nn.Module, walk: BatchIterator) -> NextLoss:
        return forward.TaskLoss(module, walk, task.loss, task.step, plan.precision, context.device)

    def evaluate(module: nn.Module) -> dict[str, float]:
        assert test is not None
        predict = None if division is None or division.pipeline is None else division.pipeline.infer
        sums = forward.evaluate(
            module, test, *context.evaluates, 4 * (plan.batch or DEFAULT_BATCH), task.loss, task.step, task.metrics, plan.precision, context.device, predict
        )  # fmt: skip
        if not context.speaks:
            sums.zero_()
        context.link.all_reduce({"sums": sums}).wait()
        *totals, count = sums.tolist()
        if not count:
            raise TaskError("Task.test gave no sample; give at least one, or leave test out")
        return {
            name: total / count
            for name, total in zip(["loss", *task.metrics], totals, strict=False)
        }

    division: ModelPart | None = None
    watched: MemoryWatch | None = None
    if context.divided:
        from manyhands.assembly.model_parallel import by_feature, divide

        if plan.split == "by_feature":
            division = by_feature(
                context, model.to(context.device), [train] if test is None else [train, test]
            )
        else:
            division = divide(context, plan, model, train, task)  # which moves what is left of it
    elif train.samples and not isinstance(train, StreamSource) and not plan.servers:
        watched = watch(context, plan, model, lambda: example(context, plan, train), task)
    return assemble(
        context,
        plan,
        model,
        task.optimizer,
        task.schedule,
        train,
        losses,
        None if test is None else evaluate,
        stop_requested,
        run,
        tuple(task.callbacks),
        ids=task.ids,
        division=division,
        watched=watched if division is None else division.watched,
    )[0]


def assemble(
    context: RankContext,
    plan: Plan,
    model: nn.Module,
    make_optimizer: Callable[[Any], Optimizer],
    make_schedule: Callable[[Optimizer], LRScheduler] | None,
    train: Source,
    losses: Callable[[nn.Module, BatchIterator], NextLoss],
    evaluate: Callable[[nn.Module], dict[str, float]] | None,
    stop_requested: Callable[[], int],
    run: Any,
    callbacks: tuple[Callback, ...] = (),
    one_copy: bool = True,
    ids: Callable[[Any], Mapping[str, Any]] | None = None,
    division: ModelPart | None = None,
    watched: MemoryWatch | None = None,
) -> tuple[Trainer, BatchIterator, nn.Module, Plan]:
    """Put one rank's parts together; resume if asked. `one_copy`: the ranks of a host may share their parameters."""
    size, seed = context.feeds, plan.seed or 0
    order = {
        "split": plan.split,
        "seed": seed,
        "samples": train.samples,
    }  # what the order of samples follows from
    saved = found(context, order) if context.options.resume else None
    plan, global_batch = batch_sizes(context, plan, saved)
    model = model.to(context.device) if division is None else division.module
    pipeline = None if division is None else division.pipeline
    stages = [model] if pipeline is None else pipeline.modules
    # a pipeline draws all micro-batches of a step before it computes the first
    synced = _with_batchnorm(
        context, plan, stages, lambda: walk.counts if pipeline is None else pipeline.counts
    )
    module = division.module if division is not None else stages[0]
    serving = open_serving(context, plan, module, ids)
    if plan.recompute and pipeline is None:
        recompute(module)
    optimizer = make_optimizer(module.parameters())
    _check_optimizer(context, plan, module, optimizer)
    flat, update = lay_out(context, plan, _agree(plan), module, optimizer, one_copy)
    same_rest(context, module)
    schedule = None if make_schedule is None else make_schedule(optimizer)
    scaler = torch.amp.GradScaler(context.device.type) if plan.precision == "fp16" else None
    state.seed_everything(seed, context.stream)
    at = Position() if saved is None else saved.position
    own_walk, dealer = draw(
        context, plan, train, global_batch, seed, at, serving, borrow=synced or context.gathers
    )
    rows = None if serving is None else serving.sparse
    walk: BatchIterator = (
        own_walk
        if rows is None
        else PrefetchedBatches(
            own_walk, rows, plan.lookahead if plan.servers and dealer is None else 0
        )
    )
    computing = cast(nn.Module, torch.compile(module)) if plan.compile else module
    next_loss = losses(computing, walk)
    plain = ModuleReplica(
        flat, update, next_loss, nominal=global_batch if _agree(plan) or shares_steps(plan) else max(1, global_batch // plan.layout.data),
        clip=plan.clip, schedule=schedule, scaler=scaler,
        overlap=not synced,  # BatchNorm exchanges inside backward: buckets among its calls could come in another order elsewhere
        left_out=[p for p in module.parameters() if not p.requires_grad],
        on_unused=lambda names: context.notice(f"parameters without a gradient in the first round (left as they are): {', '.join(names)}"),
        ended=lambda: trainer.block_ends(), steps_alone=not _agree(plan),
        on_window=None if rows is None else lambda: rows.push(_row_scale(plan, plain, walk, size), _rate(optimizer)),
        passes=None if pipeline is None else lambda scaled: _piped(context, pipeline, scaled, walk),
        replica_group=None if division is None else division.replica_group(context, flat),
        schedule_at=None if dealer is None or not shares_steps(plan) else lambda: dealer.latest.steps // size, scheduled=at.steps // size,
    )  # fmt: skip
    context.closing += [walk.close, plain.close]
    held = None if division is None else division.held(context, module, flat, update)
    assembled, local = (None, None) if held is None else held
    snapshots = Checkpointing(
        context,
        plan,
        module,
        plain,
        walk,
        global_batch,
        order,
        serving,
        parts=assembled,
        local=local,
    )
    first = _first_rule(plan, saved)
    if saved is not None:
        snapshots.restore(saved, str(getattr(plan, first)))
    if serving is not None and plan.strategy.link is Store:
        assert isinstance(flat, FlatParameters)  # of whole models
        serving.hold(plan.strategy, flat, snapshots.consensus or flat.values, optimizer, saved)
    learns_from_others = any(rule.distils for rule in _rules(plan).values())
    replica: Any = (
        student(plain, next_loss)
        if learns_from_others
        else _captured(context, plan, plain, next_loss, walk)
    )
    known: Any = plain  # to rules, when they begin
    if any(rule.thins for rule in _rules(plan).values()):
        if context.divided:
            raise PlanError(
                "merge=skeleton leaves out units of whole layers, which tensor=, pipe= and shard= cut; leave them out"
            )
        replica = known = thinned(replica, module, next_loss, train)
        context.closing.append(known.close)
        context.notice(
            f"units of {', '.join(known.names)} may be left out; everything else is on every rank"
        )
    rule = _rule(context, plan, known, first, serving, saved, snapshots)
    if saved is not None:
        context.notice(
            f"resumed at round {saved.round} (epoch {at.epoch}, {at.offset} samples into it) from {context.checkpoints.last_good}"
        )

    def agree_on_buffers() -> None:
        buffers = sync_batchnorm.running_buffers(module) if not synced and size > 1 else []
        if buffers:
            context.mean_over_feeds({str(i): b for i, b in enumerate(buffers)})

    def snapshot(round: int, rule: ActiveStrategy) -> Snapshot:
        agree_on_buffers()
        taken = snapshots.take(round, rule, trainer.metrics)
        if serving is not None:  # nobody pushes on before rank 0 has all of the tables
            context.link.all_reduce({"taken": torch.zeros(1, device=context.device)}).wait()
        return taken

    def save(snapshot: Snapshot, metrics: dict[str, float]) -> None:
        snapshots.save(snapshot, metrics)
        for callback in trainer.callbacks:
            callback.on_checkpoint(run, str(context.checkpoints.path(snapshot.round)))

    if watched is not None:
        watched.begin(module, optimizer, flat, rule.state)
        callbacks = (*callbacks, watched)
    comes_later = plan.then is not None and first == "merge"
    trainer = Trainer(
        rule, replica, context.link, context.merging,
        position=lambda: walk.position, samples=lambda: walk.samples,
        epochs=math.inf if plan.epochs is None else plan.epochs, steps=math.inf if plan.steps is None else plan.steps,
        emit=context.recorder.emit, flush=context.recorder.flush, snapshot=snapshot, save=save,
        evaluate=evaluate and (lambda: evaluate(computing if pipeline is None else nn.ModuleList(stages))),
        last_good=lambda: _last_good(context.checkpoints), save_evaluated=plan.best is not None,
        save_every={"epoch": 0, "off": None}.get(plan.save, int(plan.save) if plan.save.isdigit() else 0),
        stop_requested=stop_requested, directory=str(context.directory), device=context.device,
        until=plan.until, evaluate_every=int(plan.evaluate) if plan.evaluate.isdigit() else None, change_at=plan.at,
        change=(lambda: _rule(context, plan, known, "then", serving)) if comes_later else None, agree=agree_on_buffers,
        measured=contextlib.nullcontext if watched is None else watched.measured,
        callbacks=(*callbacks, *context.options.callbacks), round=0 if saved is None else saved.round, run=run,
        metrics={} if saved is None else dict(saved.meta["metrics"]), dealer=dealer, serves=serving is not None,
        settle=serving.settle if serving is not None else lambda: None, tell=serving.tell if serving is not None else lambda round: None,
    )  # fmt: skip
    _announce(context, plan, module, global_batch, division)
    return trainer, walk, computing, plan


# -- the parts --


def _piped(
    context: RankContext,
    pipeline: Any,
    scaled: Callable[[Tensor, int], Tensor],
    walk: BatchIterator,
) -> tuple[Tensor, int]:
    pipeline.round = context.link.round
    passed: tuple[Tensor, int] = pipeline(scaled, walk)
    return passed


def _rules(plan: Plan) -> dict[str, Strategy[Any, Any]]:
    """The rule of the start and the one that comes after it, by their part in the plan."""
    later = {} if plan.next_strategy is None else {"then": plan.next_strategy}
    return {"merge": plan.strategy, **later}


def _agree(plan: Plan) -> bool:
    return all(rule.replicas_agree for rule in _rules(plan).values())


def _row_scale(plan: Plan, replica: ModuleReplica, walk: BatchIterator, size: int) -> float:
    """What a gradient of rows, made by a loss times count / nominal, is multiplied by to be this rank's part of a step."""
    if not replica.own_count:
        return 1.0
    mean = (
        replica.nominal * walk.own / replica.own_count
    )  # a task may count tokens; ranks divide a step by samples
    return (
        mean / walk.own * plan.strategy.share(size)
        if shares_steps(plan)
        else mean / max(1, walk.total)
    )


def _rate(optimizer: Optimizer) -> float:
    """By how much the schedule has changed the learning rate: that of embeddings follows."""
    group = optimizer.param_groups[0]
    first = float(group.get("initial_lr", group["lr"]))
    return float(group["lr"]) / first if first else 1.0


def _first_rule(plan: Plan, saved: Snapshot | None) -> str:
    """A resumed run that has changed its rule already goes on with the second one."""
    changed = (
        saved is not None
        and saved.meta.get("part") == "then"
        and saved.meta.get("rule") == plan.then
    )
    return "then" if changed else "merge"


def _rule(
    context: RankContext,
    plan: Plan,
    replica: ModuleReplica,
    part: str,
    serving: RunTables | None = None,
    saved: Snapshot | None = None,
    snapshots: Checkpointing | None = None,
) -> ActiveStrategy:
    """A rule ready to work: its link, behind the plan's algorithm and wire, and its state, new or restored."""
    strategy, name = _rules(plan)[part], str(getattr(plan, part))
    if strategy.link is Store:
        assert serving is not None
        on_gpu = context.device.type == "cuda"
        store: Store = DeviceStore(serving.store, context.device) if on_gpu else serving.store
        rule = ActiveStrategy(part, name, strategy, store, strategy.init(replica))
        if saved is not None and snapshots is not None:
            snapshots.restore_rule(saved, rule)
        return rule
    link: Group = context.merging
    if plan.algorithm != "native" and link.size > 1:
        if context.device.type == "cuda":
            raise PlanError(
                f"algorithm={plan.algorithm} is for CPU processes, but this rank computes on a GPU; leave it out"
            )
        link = algorithms.wrap(link, plan.algorithm)
    wire = None
    if plan.codec is not None and link.size > 1:
        link = wire = compression.wrap(link, plan.codec, strategy.sends, replica.flat.shapes())
        for values in replica.params.values():
            wire.warm(values)
    gauge = None
    if (
        strategy.sends == "gradients"
        and not strategy.swaps
        and link.size > 1
        and not context.divided
    ):
        buckets = [b.name for b in replica.flat.buckets]
        link = gauge = NoiseGauge(link, buckets, lambda: context.link.round, context.device)
    rule = ActiveStrategy(
        part,
        name,
        strategy,
        link,
        strategy.init(replica),
        gauge,
        dict if wire is None else lambda: wire.state,
    )
    if saved is not None and snapshots is not None:
        of_wire = snapshots.restore_rule(saved, rule)
        if wire is not None:
            wire.load_state(of_wire)
    return rule


def _check_optimizer(
    context: RankContext, plan: Plan, module: nn.Module, optimizer: Optimizer
) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TaskError(
            "torch.optim.LBFGS evaluates the loss several times a step and cannot be merged over ranks; use SGD, Adam or AdamW"
        )
    for axis in ("shard", "tensor"):
        if getattr(plan.layout, axis) > 1:
            check_sharded(optimizer, axis)
    known = {id(p) for p in module.parameters()}
    if strangers := sum(id(p) not in known for g in optimizer.param_groups for p in g["params"]):
        raise TaskError(
            f"{strangers} of the optimizer's parameters are not the model's, so nobody would merge or save them; "
            "make them parameters of the model (a learnable temperature: self.temperature = nn.Parameter(...))"
        )
    own = getattr(plan.codec, "momentum", 0)
    if own and any(g.get("momentum") for g in optimizer.param_groups):
        raise TaskError(
            f"compress.momentum={own} keeps momentum before compression, and the optimizer has momentum too: it would count twice; "
            "give the optimizer momentum=0 or set compress.momentum=0"
        )
    if context.process.size > 1 and has_sparse_gradients(module):
        raise TaskError(
            "an embedding with sparse=True gives sparse gradients, which this rule cannot merge; set sparse=False"
        )


def _with_batchnorm(
    context: RankContext, plan: Plan, modules: list[nn.Module], counts: Callable[[], bool]
) -> bool:
    """Have BatchNorm see the union of all batches, where it is to; whether it is there at all."""
    # steps that a rank takes by itself are not held up by statistics of others
    synced = plan.batchnorm == "sync" or (plan.batchnorm == "auto" and _agree(plan))
    if (
        context.feeds == 1
        or not synced
        or not any(sync_batchnorm.has_batchnorm(m) for m in modules)
    ):
        return False

    def reduce(values: Tensor) -> None:
        context.sum_over_feeds({"batchnorm": values})

    modules[:] = [sync_batchnorm.synchronise(m, reduce, counts) for m in modules]
    return True


def _captured(
    context: RankContext,
    plan: Plan,
    replica: ModuleReplica,
    next_loss: NextLoss,
    walk: BatchIterator,
) -> ModuleReplica | CapturedReplica:
    """Capture the step as CUDA graphs where that is possible; a rule that looks at gradients needs them between the two."""
    possible = (
        plan.capture == "auto" and context.device.type == "cuda" and context.process.size == 1 and replica.scaler is None and _agree(plan)
        and isinstance(next_loss, forward.TaskLoss) and isinstance(walk, IndexedBatches) and isinstance(walk.source, TensorSource)
    )  # fmt: skip
    if not possible:
        return replica
    assert isinstance(next_loss, forward.TaskLoss) and isinstance(walk, IndexedBatches)
    return CapturedReplica(replica, next_loss, walk, context.notice)


def _last_good(checkpoints: Checkpoints) -> str | None:
    checkpoints.wait()
    if checkpoints.last_good is None and (found := checkpoints.all()):
        return str(found[-1])
    return None if checkpoints.last_good is None else str(checkpoints.last_good)


def loader_batch(train: Any) -> int | None:
    return train.batch_size if isinstance(train, DataLoader) else None


def _announce(
    context: RankContext,
    plan: Plan,
    module: nn.Module,
    global_batch: int,
    division: ModelPart | None,
) -> None:
    if context.rank != 0:
        return
    resolved = dataclasses.replace(plan, threads=torch.get_num_threads())
    (context.directory / "plan.toml").write_text(words.to_toml(resolved))
    here = sum(p.numel() for p in module.parameters())
    model = (
        f"{type(module).__name__}, {here:,} parameters"
        if division is None
        else f"{division.name}, {here:,} of them on rank 0"
    )
    where = (
        f"{context.process.size} x {context.device.type} over {context.link_name}"
        if context.process.size > 1
        else context.device.type
    )
    told = {
        "start": words.describe(resolved),
        "model": f"{model}; {global_batch} samples a step; {where}",
        "run": str(context.directory),
    }
    for name, text in told.items():
        context.recorder.emit(Event(time.time(), 0, context.link.round, name, value=text))
    context.recorder.flush()
