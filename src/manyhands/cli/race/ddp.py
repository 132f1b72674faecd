"""`ddp` as a plan of a race: the task trained by torch's DistributedDataParallel.

It is written as a careful user would write it. It iterates over the same batches as our plans (the
same order, each rank its slice of the same global batch), weights an uneven last batch correctly,
uses the task's optimizer, schedule, clipping and test, evaluates at the same steps, and writes the
same events into a run directory, so that readers of runs need not know the difference. Nothing else
of ours is in its step: no flat buffers, no group, no allocator settings. What torch has for slow
networks goes with it, by our words (`ddp_hooks`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.assembly.connect import choose_device
from manyhands.assembly.data import DEFAULT_BATCH, with_task_defaults
from manyhands.assembly.rank_context import Options
from manyhands.cli.race import ddp_evaluation, ddp_hooks
from manyhands.cli.race.ddp_data import ddp_batches
from manyhands.cli.race.ddp_hooks import DDPHooks
from manyhands.cli.race.ddp_schedule import DDPSchedule
from manyhands.core import (
    Event,
    Plan,
    ProcessInfo,
    Result,
)
from manyhands.data.batches import StreamedBatches
from manyhands.data.sources import source
from manyhands.entry import MakeTask, starting_model
from manyhands.errors import Diverged, PlanError
from manyhands.launch import environment
from manyhands.launch.signals import Stop
from manyhands.metrics.evaluation_pass import EvaluatedModel
from manyhands.metrics.metric_set import MetricSet
from manyhands.observe.events import Recorder
from manyhands.plan import words as plan_words
from manyhands.plan.words import Words
from manyhands.recover import directory
from manyhands.replica import forward, state
from manyhands.replica.objective import Objective
from manyhands.task import Task, resolve
from manyhands.task_forms.named_parts import only
from manyhands.train import STATUS_EVERY_S

# the plan words of all plans that have a meaning for DDP; it has no groups to choose from
SHARED = tuple(
    "data split batch accumulate epochs steps seed precision clip device ranks_per_gpu threads "
    "bucket_mb loaders compile until evaluate timeout_s".split()
)
KNOWN = (*SHARED, *ddp_hooks.OPTIONS)  # the latter where a plan gives them itself

# never freed: DDP frees the process group while it holds the interpreter's lock, and waits for
# gloo's thread, which needs that lock to free what is left of the last exchange
_groups: list[Any] = []


def check(words: dict[str, Any]) -> None:
    """Refuse words that have no meaning for DDP."""
    if unknown := [k for k in words if k not in KNOWN]:
        raise PlanError(
            f"{', '.join(unknown)}: has no meaning for ddp, which knows {', '.join(KNOWN)}; "
            "leave it out"
        )
    ddp_hooks.check(words)


def work(make: Callable[[], MakeTask], words: Words, options: Options) -> dict[str, Any]:
    """Train as one rank of DDP, from connecting to the result; `make` loads the task."""
    here = environment.process_info()
    plan = plan_words.parse(words, size=here.size)
    with Stop(interrupt=here.started_by != "manyhands") as stop:
        store = dist.PrefixStore("ddp", environment.store(here, plan.timeout_s))
        device = choose_device(plan, here)
        if device.type == "cuda":
            # as in a script of the user's own
            torch.cuda.set_stream(torch.cuda.default_stream(device))
        if plan.threads is not None:
            torch.set_num_threads(plan.threads)
        task, seed = resolve(make(), plan.seed)
        path = Path(options.directory or options.name)
        owner = directory.claim(path) if here.rank == 0 else None
        recorder = Recorder(path, here.rank)
        backend = "nccl" if device.type == "cuda" and plan.ranks_per_gpu == 1 else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=here.rank,
            world_size=here.size,
            timeout=timedelta(seconds=plan.timeout_s),
        )
        _groups.append(dist.group.WORLD)
        try:
            run = DDPRun(
                task,
                with_task_defaults(plan, task, seed),
                here,
                device,
                recorder,
                str(path),
                lambda: stop.requested,
                plan_words.overlay(words),
            )
            return dataclasses.asdict(run.train())
        finally:
            recorder.close()
            dist.destroy_process_group()
            if owner is not None:
                owner.close()


class DDPRun:
    """One rank of a DDP run."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        process: ProcessInfo,
        device: torch.device,
        recorder: Recorder,
        path: str,
        stop_requested: Callable[[], int],
        given: dict[str, Any],
    ):
        self.task, self.plan, self.device = task, plan, device
        self.rank, self.size = process.rank, process.size
        self.recorder, self.path, self.stop_requested = recorder, path, stop_requested
        batch = plan.batch or DEFAULT_BATCH
        self.global_batch = batch * plan.accumulate * self.size
        self.test_batch = 4 * batch
        module = starting_model(task).to(device)
        if device.type == "cuda":
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # torch has it for GPUs only
        self.module = module
        self.nbytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        self.optimizer = only(task.optimizer)(module.parameters())
        self.scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == "fp16")
        state.seed_everything(plan.seed or 0, self.rank)
        self.batches = ddp_batches(task, plan, device, self.global_batch, self.rank, self.size)
        self.schedule = DDPSchedule(task, plan, self.optimizer, self.batches)
        self.test = (
            None if task.test is None else source(task.test, device, "Task.test", plan.loaders)
        )
        self.metric_set = MetricSet(task.metrics, device, self.size)
        self.ddp = self._ddp(given)
        self.hooks = DDPHooks(plan, self.ddp, self.optimizer)
        computing: Any = torch.compile(self.ddp) if plan.compile else self.ddp
        self.losses = forward.TaskLoss(
            computing,
            self.batches,
            Objective(task.loss, task.step, task.reduction),
            plan.precision,
            device,
        )
        self.round = self.evaluated = 0
        self.next_status = 1
        self.rounds: list[tuple[float, float]] = []  # since the last status: start, seconds
        self.loss_sum, self.count = torch.zeros((), dtype=torch.float64, device=device), 0
        self.loss, self.rate, self.samples_seen = math.nan, 0.0, 0.0
        self.waited = 0.0  # seconds in exchanges, so far
        self.stopped = 0
        self.reached = False
        self.metrics: dict[str, float] = {}
        self._announce(given)

    def _ddp(self, given: dict[str, Any]) -> DistributedDataParallel:
        device = self.device
        ddp = DistributedDataParallel(
            self.module,
            device_ids=[device.index] if device.type == "cuda" else None,
            # else torch's own choice
            bucket_cap_mb=self.plan.bucket_mb if "bucket_mb" in given else None,
        )
        # Timing every step costs a few readings of the clock; on a GPU it would wait for events.
        if device.type == "cpu":
            ddp._set_ddp_runtime_logging_sample_rate(1)
        return ddp

    # -- the loop --

    def train(self) -> Result:
        self.started = self.status_s = time.perf_counter()
        self.seen_at_status = 0.0
        while not self.finished():
            epoch, started, clock = self.batches.position.epoch, time.time(), time.perf_counter()
            self.step()
            self.round += 1
            self.rounds.append((started, time.perf_counter() - clock))
            if self.round >= self.next_status:
                self.share_status()
            ended = self.batches.position.epoch > epoch
            every = 0 if self.plan.evaluate == "epoch" else int(self.plan.evaluate)
            if ended or (every and self.round % every == 0):
                self.evaluate()
        self.share_status()
        if not self.stopped and self.evaluated < self.round:
            self.evaluate()
        seconds = time.perf_counter() - self.started
        rate = self.samples_seen / max(seconds, 1e-9)
        metrics = {**self.metrics, "train_loss": self.loss}
        self._emit("finish", {**metrics, "samples_per_s": rate}, seconds)
        return Result(self.path, self.round, self.epochs(), seconds, rate, metrics, self.stopped)

    def step(self) -> None:
        """The whole of what a user writes by hand: DDP exchanges inside backward."""
        total = self._total()
        self.optimizer.zero_grad()
        last = False
        while not last:
            batch = self.batches.next()
            last = batch.last
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                loss, _ = self.losses.forward(batch.values, batch.count)
                # DDP averages over ranks: this makes it the mean over the samples of all ranks
                share = batch.count * self.size / total if total else float(batch.count > 0)
                if self.task.reduction == "sum":  # here: the sum over them
                    share = float(batch.count * self.size)
                self.scaler.scale(loss * share).backward()
            self.loss_sum += loss.detach() * batch.count
            self.count += batch.count
        if self.plan.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self.plan.clip)
        self.scaler.step(self.hooks.optimizer)
        self.scaler.update()
        self.schedule.stepped(self.batches.position)

    def _total(self) -> int | None:
        """Samples of the next step over all ranks; unknown for a stream."""
        samples, at = self.batches.samples, self.batches.position
        return (
            None
            if isinstance(self.batches, StreamedBatches) or samples is None
            else min(self.global_batch, samples - at.offset)
        )

    def finished(self) -> bool:
        steps, epochs = self.plan.steps, self.plan.epochs
        return (
            self.reached
            or self.stopped > 0
            or (steps is not None and self.batches.position.steps >= steps)
            or (epochs is not None and self.epochs() >= epochs - 1e-9)
        )

    def epochs(self) -> float:
        at, samples = self.batches.position, self.batches.samples
        return at.epoch + min(at.offset / samples, 1 - 1e-6) if samples else float(at.epoch)

    # -- what ranks must agree on --

    def share_status(self) -> None:
        """Agree on a signal, a loss that is not finite, and the mean loss.

        It runs about four times a second, as in our own loop.
        """
        now = time.perf_counter()
        elapsed, rounds = now - self.status_s, len(self.rounds)
        if not rounds:
            return
        interval = (
            max(1, min(1000, int(STATUS_EVERY_S * rounds / max(elapsed, 1e-9))))
            if self.rank == 0
            else 0
        )
        mine = [
            float(self.stop_requested()),
            float(self.loss_sum),
            float(self.count),
            float(interval),
        ]
        shared = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared)
        stop, total, count, agreed = shared.tolist()
        self.stopped = (self.stop_requested() or 15) if stop else 0
        self.next_status = self.round + int(agreed)
        self.loss = total / count if count else self.loss
        if not math.isfinite(total):
            raise Diverged(
                f"the loss became NaN or infinite by round {self.round} (epoch {self.epochs():.2f})"
            )
        waited, nbytes = self._waited_s(rounds), self.hooks.nbytes(self.nbytes)
        for i, (started, seconds) in enumerate(self.rounds, self.round - rounds + 1):
            self.recorder.emit(Event(started, self.rank, i, "round", seconds))
            waiting = min(waited, seconds)
            self.recorder.emit(
                Event(started + seconds - waiting, self.rank, i, "all_reduce", waiting, nbytes)
            )
        seen = self.epochs() * (self.batches.samples or 0)
        rate = (seen - self.seen_at_status) / max(elapsed, 1e-9)
        self.rate = 0.7 * self.rate + 0.3 * rate if self.rate else rate
        self.samples_seen = self.seen_at_status = seen
        limit = {} if self.plan.epochs is None else {"epochs": self.plan.epochs}
        value = {
            "epoch": self.epochs(),
            **limit,
            "loss": self.loss,
            "samples_per_s": self.rate,
            "step": float(self.round),
        }
        self._emit(
            "progress", {**value, "exchange_share": min(1.0, waited * rounds / max(elapsed, 1e-9))}
        )
        self.rounds.clear()
        self.loss_sum.zero_()
        self.count, self.status_s = 0, time.perf_counter()
        self.recorder.flush()

    def _waited_s(self, rounds: int) -> float:
        """Seconds that a step since the last status waited for peers, by DDP's own measurement.

        It is the time after the last gradient of the step was computed.
        """
        data = self.ddp._get_ddp_logging_data()
        exchange, hidden = (
            data.get(f"avg_backward_{k}", 0) for k in ("comm_time", "compute_comm_overlap_time")
        )
        # DDP reports a mean over all steps so far
        before, self.waited = self.waited, (exchange - hidden) / 1e9 * self.round
        return max(0.0, (self.waited - before) / rounds)

    def evaluate(self) -> None:
        self.share_status()
        self.evaluated = self.round
        if self.test is None:
            return
        started, clock, task = time.time(), time.perf_counter(), self.task
        self.hooks.merge()
        for buffer in self.module.buffers():  # as DDP itself does before a forward pass in training
            dist.broadcast(buffer, 0)
        objective, precision = self.losses.objective, self.plan.precision
        self.metrics = ddp_evaluation.evaluate(
            EvaluatedModel(self.module, objective, task.predict, precision),
            self.test,
            self.metric_set,
            self.rank,
            self.size,
            self.test_batch,
            self.device,
        )
        self.schedule.evaluated(self.metrics)
        where = {"epoch": self.epochs(), "step": float(self.batches.position.steps)}
        seconds = time.perf_counter() - clock
        self.recorder.emit(
            Event(
                started, self.rank, self.round, "evaluate", seconds, value={**where, **self.metrics}
            )
        )
        self.recorder.flush()
        self.reached = self.plan.until is not None and self.plan.until.reached(
            {**self.metrics, **where}
        )
        self.status_s = time.perf_counter()

    # -- events of rank 0 --

    def _emit(self, name: str, value: str | dict[str, float], seconds: float = 0.0) -> None:
        if self.rank == 0:
            self.recorder.emit(Event(time.time(), 0, self.round, name, seconds, value=value))

    def _announce(self, given: dict[str, Any]) -> None:
        resolved = {
            **plan_words.to_dict(dataclasses.replace(self.plan, threads=torch.get_num_threads())),
            **given,
        }
        words = {
            k: v for k, v in resolved.items() if k in KNOWN and (k != "bucket_mb" or k in given)
        }
        parameters = sum(p.numel() for p in self.module.parameters())
        where = f"{self.size} x {self.device.type} over {dist.get_backend()}"
        self._emit("start", f"ddp {plan_words.line(words)}")
        self._emit(
            "model",
            f"{type(self.module).__name__}, {parameters:,} parameters; "
            f"{self.global_batch} samples a step; {where}",
        )
        self._emit("run", self.path)
        if self.device.type == "cpu" and any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules()
        ):
            self._emit(
                "notice",
                "torch has no synchronised BatchNorm for CPUs: "
                "every rank uses the statistics of its own batch",
            )
        self.recorder.flush()
