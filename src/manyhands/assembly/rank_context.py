"""Rank context: device, groups, run directory, recorder of a rank, before there is a model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.assembly.connect import axis_group, choose_device, connect
from manyhands.assembly.culprits.watcher import Watcher
from manyhands.core import (
    Event,
    Layout,
    Plan,
    ProcessInfo,
    Tensors,
)
from manyhands.errors import PlanError
from manyhands.exchange.elastic import ElasticGroup, Gather
from manyhands.exchange.interruption import Interruption
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.shared import SharedGroup
from manyhands.launch import environment
from manyhands.launch.malloc import keep_freed_memory
from manyhands.observe.events import Recorder, Sink
from manyhands.observe.sinks import open_sinks
from manyhands.recover import directory
from manyhands.recover.checkpoint import Checkpoints
from manyhands.task import Callback


@dataclass(frozen=True)
class Options:
    """Options of a run that change no number: its name, directory, output."""

    name: str = "run"
    directory: str | None = None
    resume: bool = False
    tensorboard: bool = False
    quiet: bool = False
    float64: bool = False
    anyway: bool = False  # start although the memory forecast says it will not fit
    # of `verify`: this one rank takes the union of so many ranks' batches as one batch
    stands_for: int = 1
    # of `verify`: entered around each round, in place of the meter of memory
    around_round: contextlib.AbstractContextManager[Any] | None = None
    base: str = "runs"
    words: str = ""  # the plan as it was given, without defaults; --resume goes on with it
    kept: str = ""  # of a resumed run: those of its words that are in force still
    callbacks: tuple[Callback, ...] = ()
    script: str = ""  # that the run was started with; "": from Python
    arguments: tuple[str, ...] = ()  # of the script
    held: bool = False  # the launcher has chosen the directory, and owns it

    def to_json(self) -> str:
        """For a script that joins the run in another process; callbacks stay behind."""
        fields = [f.name for f in dataclasses.fields(self) if f.name != "callbacks"]
        return json.dumps({name: getattr(self, name) for name in fields})

    def overlaid(self, handed: str) -> Options:
        """These options, with those of a launcher (`to_json`) that it was asked for."""
        plain = Options()
        given = {k: v for k, v in json.loads(handed).items() if v != getattr(plain, k)}
        return dataclasses.replace(self, **given)


@dataclass
class RankContext:
    """Everything of a rank that exists before the model does."""

    process: ProcessInfo
    plan: Plan
    options: Options
    store: dist.Store
    device: torch.device
    group: ObservedGroup  # all ranks
    # ranks that differ from this one along one axis of the layout only: data, shard, pipe, tensor
    axes: dict[str, ObservedGroup]
    directory: Path
    recorder: Recorder
    checkpoints: Checkpoints
    owner: Any
    group_name: str
    # what the run has opened since: loader processes, servers
    to_close: list[Callable[[], None]] = field(default_factory=list)
    # how servers that this rank had started have ended; "": none has
    server_failures: Callable[[], str] = str
    # of an elastic run between ranks (`assembly.regroup.epochs.Regrouping`)
    regrouping: Any = None
    interruption: Interruption | None = None  # ends what this rank waits for
    measured: dict[str, list[int]] = field(default_factory=dict)  # by rank 0, for all ranks
    replaces: bool = False  # this process took the place of one that died
    watcher: Watcher | None = None  # of a run with more than one process
    _plan_text: str = ""
    _gather: Gather | None = None
    _shown: list[Sink] = field(default_factory=list)  # where it reports in rank 0's place

    @property
    def elastic(self) -> ElasticGroup | None:
        """The group of ranks that may die and be replaced, where they may."""
        group = self.group.group
        return group if isinstance(group, ElasticGroup) else None

    @property
    def leads(self) -> bool:
        """Whether this rank writes and reports for all: rank 0, or the first that lives."""
        return self.rank == 0 if self.elastic is None else self.elastic.leads

    def take_part(self, gather: Gather, replaces: bool) -> None:
        """Of an elastic group: from now on this rank exchanges with the others; one that replaces a
        dead rank only from when it knows what they know (`follow`)."""

        def gather_and_follow(payload: bytes) -> Mapping[int, bytes]:
            found = gather(payload)
            self.follow(sorted(found))
            return found

        assert self.elastic is not None
        self.replaces, self._gather = replaces, gather_and_follow
        if not replaces:
            self.elastic.gather = self._gather

    def follow(self, running: Sequence[int]) -> None:
        """The ranks that are at work; the first of them reports."""
        assert self.elastic is not None
        self.elastic.gather = self._gather
        self.elastic.members = tuple(running)
        if self.leads and self.rank and not self._shown:
            self._shown = _sinks(self.directory, self.options, self.plan)
            self.recorder.add(self._shown)
        elif self._shown and not self.leads:  # one before it has come back
            self.recorder.remove(self._shown)
            self._shown = []

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def data_group(self) -> ObservedGroup:
        """The replicas: ranks that hold the same shard of the model."""
        return self.axes["data"]

    @property
    def data_parallel_size(self) -> int:
        """How many ranks read different batches: replicas times the shard axis."""
        return self.plan.layout.data * self.plan.layout.shard

    @property
    def data_parallel_rank(self) -> int:
        where = self.plan.layout.coordinates(self.rank)
        return where["data"] * self.plan.layout.shard + where["shard"]

    @property
    def rng_stream(self) -> int:
        """The rank whose random numbers this rank draws: alike along the tensor axis."""
        return self.rank - self.plan.layout.coordinates(self.rank)["tensor"]

    @property
    def has_output(self) -> bool:
        """Whether this rank has the model's output and counts it: one rank of those that share a
        model."""
        where = self.plan.layout.coordinates(self.rank)
        first = where["tensor"] == 0 and (where["shard"] == 0 or not self.gathers_parameters)
        return first and where["pipe"] == self.plan.layout.pipe - 1

    @property
    def gathers_parameters(self) -> bool:
        """Whether ranks of the shard axis must run the model together: they gather parameters from
        each other in every forward pass."""
        return (
            self.axes["shard"].size > 1
            and self.plan.zero == 3
            and not isinstance(self.axes["shard"].group, SharedGroup)
        )

    @property
    def evaluation_shard(self) -> tuple[int, int]:
        """Which part of the test data this rank evaluates, and of how many."""
        if self.elastic is not None:
            members = self.elastic.members
            return members.index(self.rank), len(members)
        if self.gathers_parameters:
            return self.data_group.rank, self.data_group.size
        return self.data_parallel_rank, self.data_parallel_size

    def sum_over_data(self, values: Tensors) -> None:
        for axis in ("shard", "data"):
            if self.axes[axis].size > 1:
                self.axes[axis].all_reduce(values).wait()

    def mean_over_data(self, values: Tensors) -> None:
        for axis in ("shard", "data"):
            if self.axes[axis].size > 1:
                self.axes[axis].all_reduce(values, op="mean").wait()

    def micro_batch(self, batch: int) -> int:
        """How many samples of a rank's batch are computed at once."""
        union = self.options.stands_for
        return union * -(-(batch // union) // micro_batches(self.plan))

    @property
    def splits_model(self) -> bool:
        """Whether the model is split over ranks."""
        return self.process.size > self.plan.layout.data

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, where replicas can merge them fastest."""
        return self.data_group.allocate(numel, dtype, self.device)

    def measured_by_rank_0(
        self, name: str, length: int, measure: Callable[[], Sequence[int]]
    ) -> list[int]:
        """Numbers that one rank measures for all: times differ from rank to rank. Where the run
        goes on with another group of ranks, those of the group before."""
        begin = None if self.regrouping is None else self.regrouping.begin
        if begin is not None and name in begin.meta["measured"]:
            self.measured[name] = list(begin.meta["measured"][name])
            return self.measured[name]
        said = torch.zeros(length, dtype=torch.int64, device=self.device)
        if self.rank == 0:
            said += torch.tensor(measure(), device=self.device)
        self.group.all_reduce({name: said}).wait()
        self.measured[name] = [int(n) for n in said.tolist()]
        return self.measured[name]

    def notice(self, text: str) -> None:
        entering = self.replaces and self.elastic is not None and self.elastic.gather is None
        if self.leads and not entering:
            self.recorder.emit(Event(time.time(), 0, self.group.round, "notice", value=text))

    def warn(self, text: str) -> None:
        """A notice that is shown even where --quiet hides the others."""
        if self.leads:
            self.recorder.emit(Event(time.time(), 0, self.group.round, "warning", value=text))

    def keep_directory(self) -> None:
        """Notice that the run directory was deleted or replaced under this run, and make it anew.

        Raises RunBusy where another run has it now."""
        if self.owner is None or directory.is_held(self.owner, self.directory):
            return
        self.warn(
            f"the run directory {self.directory} was deleted or replaced while this run used it: "
            "its earlier events and checkpoints are gone; it is made anew, and training goes on"
        )
        self.owner.close()
        self.owner = directory.claim(self.directory)
        self.write_plan()

    def write_plan(self, text: str | None = None) -> None:
        """Write the resolved plan, or write again the one that was written before."""
        self._plan_text = self._plan_text if text is None else text
        directory.write_plan(self.directory, self._plan_text, self.options.words)
        if self.options.script:
            directory.write_script(self.directory, self.options.script, self.options.arguments)

    def close(self) -> None:
        with contextlib.ExitStack() as rest:  # what fails to close keeps nothing else open
            if self.owner is not None:
                rest.callback(self.owner.close)
                self.owner = None
            groups = {id(group): group.close for group in (*self.axes.values(), self.group)}
            for close in reversed(
                [*self.to_close, self.checkpoints.wait, self.recorder.close, *groups.values()]
            ):
                rest.callback(close)
            self.to_close.clear()


def reduction_warning(context: RankContext, plan: Plan) -> Callable[[str], None] | None:
    """How to say that a loss looks like a sum; None where one process and one micro-batch make a
    step, so that it cannot matter."""
    passes = context.data_parallel_size * micro_batches(plan) * plan.accumulate
    return context.warn if passes > 1 and not context.options.float64 else None


def warn_of_eval_mode(context: RankContext, model: nn.Module) -> None:
    """Say that a model which a script left in eval mode is trained so."""
    depends = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    if not model.training and any(isinstance(m, depends) for m in model.modules()):
        context.warn(
            "the model is in eval mode, so that dropout and BatchNorm's statistics stand still in "
            "training too; call model.train() before"
        )


def micro_batches(plan: Plan) -> int:
    """Micro-batches of a rank's batch; a pipeline needs several to keep all its stages busy."""
    return plan.micro or (4 * plan.layout.pipe if plan.layout.pipe > 1 else 1)


def open_rank_context(
    plan: Plan,
    process: ProcessInfo,
    store: dist.Store,
    options: Options,
    interruption: Interruption | None = None,
) -> RankContext:
    device = choose_device(plan, process)
    if device.type == "cpu":
        keep_freed_memory(large=plan.layout.shard == 1 or plan.zero < 3)
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    owner, path = _open_directory(process, store, options, plan.timeout_s)
    sinks = [] if process.rank else _sinks(path, options, plan)
    recorder = Recorder(path, process.rank, sinks)
    replaced = environment.starts() is not None
    axes: dict[str, ObservedGroup] = {}
    with contextlib.ExitStack() as undo:  # where a peer is lost meanwhile
        undo.callback(recorder.close)
        inner, group_name = connect(
            plan, process, store, device, elastic_launcher=replaced, interruption=interruption
        )
        group = ObservedGroup(inner, recorder.emit)
        undo.callback(group.close)
        for axis in Layout.AXES:
            axes[axis] = axis_group(plan, process, store, device, group, axis, interruption)
            if axes[axis] is not group:
                undo.callback(axes[axis].close)
        undo.pop_all()

    def report(name: str, seconds: float, nbytes: int, text: str) -> None:
        if inner.leads if isinstance(inner, ElasticGroup) else process.rank == 0:
            recorder.emit(Event(time.time() - seconds, 0, group.round, name, seconds, nbytes, text))

    checkpoints = Checkpoints(path / "checkpoints", plan.keep, plan.best, report)
    context = RankContext(
        process,
        plan,
        options,
        store,
        device,
        group,
        axes,
        path,
        recorder,
        checkpoints,
        owner,
        group_name,
        interruption=interruption,
    )
    if process.size > 1:
        context.watcher = Watcher(context)
        context.to_close.append(context.watcher.close)
    return context


# -- run directory and sinks --


def _open_directory(
    process: ProcessInfo, store: dist.Store, options: Options, timeout_s: float
) -> tuple[Any, Path]:
    """Rank 0 chooses and owns the directory; the other ranks learn its path, or why it failed."""
    if options.held:
        assert options.directory is not None
        return None, Path(options.directory)
    if process.rank == 0:
        try:
            path = directory.choose(
                Path(options.base), options.name, options.directory, options.resume
            )
            owner = directory.claim(path)
        except Exception as e:
            store.set("directory", json.dumps({"error": str(e)}))
            raise
        store.set("directory", json.dumps({"path": str(path)}))
        return owner, path
    store.wait(["directory"], timedelta(seconds=timeout_s))
    answer = json.loads(store.get("directory"))
    if "error" in answer:
        raise PlanError(answer["error"])
    return None, Path(answer["path"])


def _sinks(path: Path, options: Options, plan: Plan) -> list[Sink]:
    return open_sinks(
        path,
        options.name,
        plan.log,
        environment.variables(),
        tensorboard=options.tensorboard,
        quiet=options.quiet,
    )
