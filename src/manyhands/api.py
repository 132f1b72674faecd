"""What a user calls: `train(task, plan)` for a whole task, `join()` for a loop of one's own.

Both end up in the same place: one process per rank, each with a `Trainer`. `train` starts the processes if nobody has;
under torchrun, srun or mpirun it joins the ones that are there. In a user's own loop the trainer runs as a coroutine:
a merge rule asks the replica for its next loss, and control passes to the user's loop until `run.step(loss)`.
"""

from __future__ import annotations

import ast
import atexit
import dataclasses
import functools
import itertools
import json
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cloudpickle
import greenlet
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.assembly import trainer
from manyhands.assembly.rank_context import Options, RankContext, open_rank_context
from manyhands.assembly.tables import PREFIX
from manyhands.core import Event, Job, ProcessInfo
from manyhands.data.batches import Batch, BatchIterator
from manyhands.data.sources import source
from manyhands.embedding.saved_rows import load_rows
from manyhands.errors import (
    LaunchError,
    ManyhandsError,
    PlanError,
    ServerLost,
    TaskError,
)
from manyhands.launch import environment
from manyhands.launch.choice import launcher
from manyhands.launch.signals import Stop
from manyhands.observe import curves
from manyhands.plan import words as plan_words
from manyhands.plan.words import Words
from manyhands.recover.checkpoint import pick
from manyhands.replica import forward
from manyhands.replica.module import Micro
from manyhands.replica.state import load_model
from manyhands.task import (
    Callback,
    Task,
    build_model,
    resolve,
)
from manyhands.train import Result, Trainer

MakeTask = Task | Callable[[], Task]

_runs = itertools.count()  # of this process
_loading: list[str] = []  # the script whose task() is being read


def train(
    task: MakeTask,
    plan: Words = "",
    *,
    directory: str | Path | None = None,
    resume: bool = False,
    name: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    tensorboard: bool = False,
    quiet: bool = False,
    port: int = 0,
) -> Result:
    """Train a task under a plan and return how it went.

    Alone, this starts `data=` processes on this machine and waits for them (one process: it trains right here).
    Under torchrun and the like it takes part in the job that is there.
    """
    if _loading:
        raise TaskError(
            f"{_loading[-1]} calls train() while its task() is loaded; put that call under: if __name__ == '__main__':"
        )
    options = Options(
        name or _script_name(),
        None if directory is None else str(directory),
        resume,
        tensorboard,
        quiet,
        callbacks=tuple(callbacks),
    )
    return start(functools.partial(work, task), plan, options, port)


def start(
    body: Callable[[Words, Options], dict[str, Any]], words: Words, options: Options, port: int = 0
) -> Result:
    """Run `body` on every rank: here, in processes of our own, or in those that somebody else started."""
    here = environment.process_info()
    plan = plan_words.parse(words, size=None if here.started_by == "alone" else here.size)
    if here.started_by == "alone" and plan.layout.size > 1:
        job = Job(
            plan.layout.size,
            _pickle(
                functools.partial(
                    _with_arguments,
                    sys.argv,
                    functools.partial(body, plan_words.overlay(words), options),
                )
            ),
            plan.threads,
            port,
        )
        result = launcher().launch(job)
    else:
        result = body(plan_words.overlay(words), options)
    finished = Result(**result) if result else Result("", 0, 0.0, 0.0, 0.0, {})
    if finished.directory and here.rank == 0 and here.started_by != "manyhands":
        _draw(finished, quiet=options.quiet)
    if (
        finished.stopped and here.started_by != "manyhands"
    ):  # whatever comes after training must not run on half a model
        by = signal.Signals(finished.stopped).name
        after = (
            "nothing was saved (save=off)"
            if plan.save == "off"
            else f"go on with --resume --dir {finished.directory}"
        )
        raise LaunchError(f"stopped by {by}; {after}", 128 + finished.stopped)
    return finished


def _with_arguments(arguments: list[str], body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    sys.argv = arguments  # a task may read the command line of the script it stands in
    return body()


def work(make: MakeTask, words: Words, options: Options) -> dict[str, Any]:
    """One rank's whole life in a task."""
    here = environment.process_info()
    plan = plan_words.parse(words, size=here.size)
    with Stop(interrupt=here.started_by != "manyhands") as stop:
        store = _corner(here, plan.timeout_s)
        task, seed = resolve(make, plan.seed)
        context = open_rank_context(plan, here, store, options)
        try:
            run = Run(context)
            run.trainer = trainer.task_trainer(
                context, task, build_model(task), seed, lambda: stop.requested, run
            )
            result = dataclasses.asdict(run.trainer.loop())
        except ServerLost as e:
            raise ServerLost("\n".join(filter(None, (str(e), context.fate())))) from e
        finally:
            context.close()
    return result


def _corner(here: ProcessInfo, timeout_s: float) -> dist.Store:
    """A part of the store for the next run of this process: one job may hold several, one after the other."""
    return dist.PrefixStore(f"run/{next(_runs)}", environment.store(here, timeout_s))


def work_script(
    script: str, arguments: list[str], words: Words, options: Options
) -> dict[str, Any]:
    """One rank's life in a script: its `task()` if it defines one, else the script itself, which calls `join()`."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    if defines_task(Path(script)):
        return work(load_task(script), words, options)
    sys.argv = [script, *arguments]
    known = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(options)
        if f.name != "callbacks"
    }
    environment.hand_over(plan_words.line(words), json.dumps(known))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        if e.code:
            raise
    return _close_joined() or {}


def defines_task(script: Path) -> bool:
    """Whether the file has a `task` at its top level; read, not run: running it may be the training itself."""
    try:
        tree = ast.parse(script.read_text(), str(script))
    except OSError as e:
        raise TaskError(f"{script} cannot be read: {e.strerror}") from None
    except SyntaxError as e:
        raise TaskError(f"{script}, line {e.lineno}: {e.msg}") from None
    names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name for a in node.names}
    return "task" in names


def load_task(script: str) -> MakeTask:
    _loading.append(script)
    try:
        made: MakeTask = runpy.run_path(script, run_name="manyhands.script")["task"]
        return made
    finally:
        _loading.pop()


# -- a loop of one's own --


class Run:
    """A rank's handle on its run: `prepare`, `step`, `log` in a loop of one's own; what callbacks are given."""

    def __init__(self, context: RankContext, stop: Stop | None = None):
        self._context, self._stop = context, stop
        self.trainer: Trainer | None = None
        self.rank, self.size = context.process.rank, context.process.size
        self.directory, self.device = context.directory, context.device
        self._loop: Any = None
        self._ended: Result | None = None  # how, where the loop was told to stop
        self._outside: Any = None
        self._micro: Micro | None = None
        self._batch: Batch | None = None

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        *,
        batch: int | None = None,
        schedule: LRScheduler | None = None,
    ) -> tuple[nn.Module, Optimizer, LoopData]:
        """Give model, optimizer and data their place in the job; use what it returns as before."""
        if self.trainer is not None:
            raise TaskError("prepare was called before; one run trains one model")
        context = self._context
        if context.divided:
            raise PlanError(
                f"{plan_words.describe(context.plan).split(' merge=')[0]} splits the model over ranks, for which manyhands must run it; "
                "give it as a task() with its loss, or use data= alone in a loop of your own"
            )
        model = model.to(context.device)
        train = source(dataset, context.device, "the training data", context.plan.loaders)
        plan = dataclasses.replace(
            context.plan,
            batch=context.plan.batch or batch or trainer.loader_batch(dataset),
            seed=context.plan.seed or 0,
        )
        # run.step starts every step without gradients; said between two micro-batches of a step, it would lose the first
        optimizer.zero_grad = _leave_gradients  # type: ignore[method-assign]
        self.trainer, walk, module, _ = trainer.assemble(
            context, plan, model, lambda _: optimizer, None if schedule is None else lambda _: schedule, train, lambda *_: self._ask,
            None, lambda: 0 if self._stop is None else self._stop.requested, self,
            one_copy=False,  # a loop of one's own may change parameters itself (clamp, average), on every rank
        )  # fmt: skip
        return (
            _Cast(module, plan.precision, context.device) if plan.precision != "fp32" else module,
            optimizer,
            LoopData(self, walk),
        )

    def step(self, loss: Tensor, count: int | None = None) -> None:
        """Backward, exchange, merge, optimizer step, zero_grad: `loss` is the mean over the batch just drawn."""
        if self._batch is None:
            raise TaskError(
                "run.step(loss) needs a batch from the data that run.prepare returned; iterate over that"
            )
        n = self._batch.count if count is None else count
        self._hand_over(
            Micro(loss if n else loss.nan_to_num(), n, self._batch.last)
        )  # a mean over nothing is 0/0

    def log(self, **values: float | Tensor) -> None:
        """Record numbers of your own; rank 0's are kept."""
        plain = {k: float(v.detach() if isinstance(v, Tensor) else v) for k, v in values.items()}
        if self.rank == 0:
            self._context.recorder.emit(
                Event(time.time(), 0, self.trainer.round if self.trainer else 0, "log", value=plain)
            )

    def close(self) -> Result | None:
        """Save and end the run; called by itself when the script ends."""
        if self in _joined:
            _joined.remove(self)
        result = self._ended
        if self.trainer is not None and self._loop is not None and not self._loop.dead:
            if self.trainer.replica.in_block:
                result = self._end_block()
            else:
                self.trainer.end_here()
                while not self.trainer.finished():
                    self.trainer.step()
                result = self.trainer.finish()
        self._loop = None
        self._context.close()
        if self._stop is not None:
            self._stop.__exit__(None, None, None)
        return result

    def merged(self) -> AbstractContextManager[None]:
        """`with run.merged():` the model holds what all replicas together stand for, to evaluate or to save it; every rank
        must come. Where a rule keeps replicas equal, that is what it holds anyway."""
        if self.trainer is None:
            raise TaskError("run.merged() needs a model; call run.prepare(...) first")
        return self.trainer.merged()

    def _end_block(self) -> Result | None:
        """The loop ended among the steps that a rule takes without its peers: what they have learnt is merged all the same."""
        assert self.trainer is not None
        self.trainer.end_here()
        self.trainer.replica.closing = True
        self._micro = Micro(None, 0, True)  # a step without samples changes nothing
        self._outside = greenlet.getcurrent()
        ended: Result | None = self._loop.switch()
        return ended

    # control passes between the rule's round and the user's loop

    def _ask(self) -> Micro:
        self._outside.switch()
        assert self._micro is not None
        return self._micro

    def _draw_step(self) -> None:
        """Where ranks draw their steps, the loop behind draws one before it asks for a loss: have it come so far."""
        if self.trainer is not None and self.trainer.dealer is not None:
            self._start_loop()

    def _start_loop(self) -> None:
        assert self.trainer is not None
        self._outside = greenlet.getcurrent()
        if self._loop is None:
            self._loop = greenlet.greenlet(self.trainer.loop)
            self._loop.switch()  # as far as the first question for a loss

    def _hand_over(self, micro: Micro) -> None:
        self._start_loop()
        self._micro = micro
        result = self._loop.switch()
        if (
            self._loop.dead
        ):  # told to stop, or another rank's loop is over and ranks share their steps
            self._ended = result
            self._end_early()

    def _end_early(self) -> None:
        requested = 0 if self._stop is None else self._stop.requested
        if self.rank == 0:
            print(f"stopped; saved in {self.directory}", file=sys.stderr)
        launched = (
            self._context.process.started_by == "manyhands"
        )  # then the launcher tells why, and with which exit code
        raise SystemExit(128 + requested if requested and not launched else 0)


class LoopData:
    """This rank's batches of one epoch at a time. Epochs that a resumed run has behind it are over at once."""

    def __init__(self, run: Run, walk: BatchIterator):
        self._run, self._walk, self._started = run, walk, 0

    def __iter__(self) -> Iterator[Any]:
        asked, epoch = self._started, self._walk.position.epoch
        self._started += 1
        while (
            self._walk.position.epoch == epoch <= asked
        ):  # to the end of this epoch; after a `break`, the rest of it
            self._run._draw_step()
            batch = self._walk.next()
            self._run._batch = batch
            if batch.values is None:
                self._run._hand_over(
                    Micro(None, 0, batch.last)
                )  # no sample left for this rank, but peers wait for it
            else:
                yield batch.values

    def __len__(self) -> int:
        if self._walk.steps_per_epoch is None:
            raise TypeError("a stream has no length")
        return self._walk.steps_per_epoch


class _Cast(nn.Module):
    """Forward in the plan's precision; outputs in fp32, so that the user's loss is."""

    def __init__(self, module: nn.Module, precision: str, device: torch.device):
        super().__init__()
        self.module, self._precision, self._device = module, precision, device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with forward.autocast(self._precision, self._device):
            out = self.module(*args, **kwargs)
        return out.float() if isinstance(out, Tensor) and out.is_floating_point() else out


def _leave_gradients(set_to_none: bool = True) -> None: ...


_joined: list[Run] = []


def join(
    plan: Words = "",
    *,
    directory: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    name: str | None = None,
) -> Run:
    """Take part in the job this process belongs to; alone, that is a world of one. The launcher's words win over `plan`."""
    here = environment.process_info()
    given = plan_words.parse(plan_words.overlay(plan, environment.words()), size=here.size)
    if given.epochs is not None or given.steps is not None:
        raise PlanError(
            "epochs= and steps= have no effect here: in a loop of your own, the loop says when to stop"
        )
    if given.until is not None or given.evaluate != "epoch":
        raise PlanError(
            "until= and evaluate= have no effect here: in a loop of your own, the loop evaluates, under run.merged()"
        )
    if given.at is not None and given.at.name not in trainer.OF_THE_RUN:
        known = ", ".join(f"at={name}:..." for name in trainer.OF_THE_RUN)
        raise PlanError(
            f"at={given.at} has no effect here: a loop of your own keeps its metrics to itself; {known} are known"
        )
    handed: Mapping[str, Any] = json.loads(environment.options())
    own = {
        "name": name or _script_name(),
        "directory": None if directory is None else str(directory),
        "resume": resume,
        "quiet": quiet,
    }
    stop = Stop(interrupt=here.started_by != "manyhands")
    stop.__enter__()
    context = open_rank_context(
        given, here, _corner(here, given.timeout_s), Options(**{**own, **handed})
    )
    run = Run(context, stop)
    _joined.append(run)
    if here.started_by != "manyhands":
        atexit.register(_close_joined)
    return run


def _close_joined() -> dict[str, Any] | None:
    if not _joined:
        return None
    run = _joined.pop()
    failed = getattr(sys, "last_value", None) is not None
    if failed:
        run._loop = None  # peers are not waiting for a closing checkpoint of a script that failed
    result = run.close()
    if (
        result is not None
        and run.rank == 0
        and environment.process_info().started_by != "manyhands"
    ):
        _draw(result, quiet=run._context.options.quiet)
    return None if result is None else dataclasses.asdict(result)


def load(directory: str | Path, model: nn.Module, best: str | None = None) -> nn.Module:
    """Load a run's newest weights, or the best by a metric ("accuracy", or "-loss"), into a model of the same shape.

    Rows of `Embedding` tables come too; in one process, models whose embeddings have one name share them.
    """
    saved = pick(Path(directory), best)
    load_model(model, saved.params)
    load_rows(
        model, {k.removeprefix(PREFIX): v for k, v in saved.state.items() if k.startswith(PREFIX)}
    )
    return model


def _draw(result: Result, quiet: bool) -> None:
    try:
        picture = curves.draw(Path(result.directory))
    except Exception as e:  # a picture must never fail a run
        print(f"no picture: {e}", file=sys.stderr)
        return
    if not quiet:
        print(f"{'picture':<12}{picture}")


def _pickle(body: Callable[[], Any]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(body))
    except Exception as e:
        if isinstance(e, ManyhandsError):
            raise
        raise TaskError(
            f"the task cannot be sent to other processes ({type(e).__name__}: {e}); make locks, sockets, open files and the like inside task(), "
            "not outside, or put the task into a file and use: manyhands run FILE"
        ) from e


def _script_name() -> str:
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return (
        name
        if name and name not in ("-c", "__main__", "ipykernel_launcher", "colab_kernel_launcher")
        else "run"
    )
