"""Entry points of a process: start the ranks of a run, or work as one of them.

start          parse the plan once, launch its ranks, wait for them
work           one rank's whole life in a task
work_script    one rank's whole life in a script: its task(), or its own loop
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from manyhands.assembly.rank_context import Options, RankContext, open_rank_context
from manyhands.assembly.regroup.elastic_job import between_ranks, elastic_job
from manyhands.assembly.regroup.epochs import Epochs
from manyhands.assembly.trainer import task_trainer
from manyhands.core import Job, Plan, ProcessInfo, Result
from manyhands.embedding.tables import embeddings
from manyhands.errors import LaunchError, ManyhandsError, PlanError, ServerLost, TaskError
from manyhands.exchange import segments
from manyhands.launch import environment
from manyhands.launch.elastic.elastic_launcher import ElasticLauncher
from manyhands.launch.fork_server.client import PRELOAD
from manyhands.launch.hosts import HostsLauncher
from manyhands.launch.lab import launcher
from manyhands.launch.rank_report import FAILED_ROUND
from manyhands.launch.restart_budget import RestartBudget
from manyhands.launch.restarts import Restarts
from manyhands.launch.signals import Stop, refuse_present
from manyhands.launch.stopping.grace import LATE
from manyhands.observe.sinks import require_loggers
from manyhands.own_loop import Run, close_joined, draw_curves, joined_runs
from manyhands.plan import words as plan_words
from manyhands.plan.words import Words
from manyhands.recover import directory
from manyhands.recover.checkpoint import Checkpoints
from manyhands.recover.starting_weights import Weights
from manyhands.replica import state
from manyhands.replica.checks import step_guard
from manyhands.replica.deferred import unmade
from manyhands.task import Task, build_model, one_thread, resolve, seed_alike

CPU = torch.device("cpu")
MakeTask = Task | Callable[[], Task]
Body = Callable[[Plan, Options], dict[str, Any]]

RESTORES = 5  # of a run that has lost servers, where restarts= says nothing

_runs: list[str] = []  # of this process, by the prefix of their keys in the store
_loading: list[str] = []  # the script whose task() is being loaded


def start(body: Body, words: Words, options: Options, port: int = 0) -> Result:
    """Run `body` on every rank: here, in processes of our own, or in those that were started."""
    here = environment.process_info()
    alone = here.started_by == "alone"
    size = None if alone else here.size
    words, options = with_saved_words(words, options, size)
    plan = plan_words.parse(words, size=size)
    before = state.rng_state(CPU), torch.get_num_threads()
    _refuse_restarts(plan, here)
    require_loggers(plan.log, options.tensorboard)
    if here.started_by != "manyhands":
        refuse_present(plan.preempt_file)
    # a run that starts itself again must outlive its only rank too
    launched = alone and (plan.layout.size > 1 or whole_restarts(plan) > 0 or between_ranks(plan))
    owned = _owned_directory(plan, options) if alone else contextlib.nullcontext(options)
    with owned as options, launcher() if launched else contextlib.nullcontext() as hosts:

        def attempt(resume: bool) -> dict[str, Any]:
            now = dataclasses.replace(options, resume=options.resume or resume)
            return body(plan, now) if hosts is None else _launch(body, plan, now, port, hosts)

        restarts = _restarts(plan, options) if alone else None
        result = attempt(False) if restarts is None else restarts.run(attempt)
        # what the script draws after this call does not depend on the run
        if alone and plan.layout.size == 1:
            state.load_rng(before[0], CPU)
            torch.set_num_threads(before[1])
    finished = Result(**result) if result else Result("", 0, 0.0, 0.0, 0.0, {})
    finished = dataclasses.replace(finished, launched=launched)
    if finished.directory and here.rank == 0:
        draw_curves(finished, options.quiet)
    # what comes after training must not run on half a model
    if finished.stopped and here.started_by != "manyhands":
        by = finished.stopped_by or signal.Signals(finished.stopped).name
        after = f"go on with --resume --dir {finished.directory}"
        if plan.save == "off":
            after = "nothing was saved (save=off)"
        raise LaunchError(f"stopped by {by}; {after}", 128 + finished.stopped)
    return finished


def _refuse_restarts(plan: Plan, here: ProcessInfo) -> None:
    """Who starts the processes must start them again."""
    word = f"restarts={plan.restarts}" if plan.restarts else ""
    if plan.on_loss == "restore" and here.started_by != "alone":
        word = "on_loss=restore"
    elif here.started_by in ("alone", "manyhands"):
        return
    if word:
        raise PlanError(
            f"{word}: who starts the processes must start them again, and "
            f"{here.started_by} does not; start them with manyhands run"
        )


def _launch(
    body: Body, plan: Plan, options: Options, port: int, hosts: HostsLauncher
) -> dict[str, Any]:
    work = functools.partial(_with_arguments, sys.argv, body, plan, options)
    job = Job(
        plan.layout.size,
        _pickle(work),
        plan.threads,
        port,
        elastic_job(plan, options),
        grace_s=plan.grace_s,
        preempt_file=plan.preempt_file,
        preload=PRELOAD,
    )
    try:
        return (ElasticLauncher(hosts) if between_ranks(plan) else hosts).launch(job)
    except LaunchError as e:
        if e.kind != LATE:
            raise
        newest = _newest(options.directory or e.directory)
        kept = f"nothing newer than {newest} is on disk" if newest else "nothing is on disk"
        do = "go on from it with --resume" if newest else "start anew"
        raise LaunchError(
            f"{e}: {kept}; {do}, with a longer grace_s=", e.exit_code, e.kind
        ) from None
    finally:
        segments.sweep(hosts.pids)  # of ranks killed while they set up shared memory


def whole_restarts(plan: Plan) -> int:
    """How often the whole run may be started again within `restart_window_s`; of an elastic run
    only its processes are."""
    return 0 if plan.elastic is not None else plan.restarts or 0


def _restarts(plan: Plan, options: Options) -> Restarts | None:
    restores, restarts = plan.on_loss == "restore", whole_restarts(plan)
    if not restores and not restarts:
        return None
    budget = RestartBudget(restarts or RESTORES, plan.restart_window_s)
    newest = functools.partial(_newest, options.directory)
    return Restarts(budget, newest, any_failure=restarts > 0, restores=restores)


def _newest(directory: str | None) -> str:
    """The last checkpoint of a run directory; "": it has none."""
    saved = Checkpoints(Path(str(directory)) / "checkpoints").all() if directory else []
    return str(saved[-1]) if saved else ""


@contextlib.contextmanager
def _owned_directory(plan: Plan, options: Options) -> Iterator[Options]:
    """Of a run that outlives its ranks the launcher owns the directory."""
    if plan.elastic is None and plan.on_loss != "restore" and not whole_restarts(plan):
        yield options
        return
    path = directory.choose(Path(options.base), options.name, options.directory, options.resume)
    with directory.claim(path):
        yield dataclasses.replace(options, directory=str(path), held=True)


def with_saved_words(words: Words, options: Options, size: int | None) -> tuple[Words, Options]:
    """The words of a run. One that resumes goes on with those it had, where none are given in their
    place: it must not change its layout or its strategy in silence. `size`: see `parse`."""
    if isinstance(words, Plan) or not options.resume:
        return words, dataclasses.replace(options, words=plan_words.line(words))
    path = directory.choose(Path(options.base), options.name, options.directory, resume=True)
    both = plan_words.continued(directory.read_words(path), words, size)
    given = plan_words.overlay(words)
    kept = plan_words.line({k: v for k, v in both.items() if k not in given})
    line = plan_words.line(both)
    return both, dataclasses.replace(options, directory=str(path), words=line, kept=kept)


def _with_arguments(
    arguments: list[str], body: Body, plan: Plan, options: Options
) -> dict[str, Any]:
    sys.argv = arguments  # a task may read the command line of the script it stands in
    return body(plan, options)


def work(make: MakeTask, words: Words, options: Options) -> dict[str, Any]:
    """One rank's whole life in a task."""
    here = environment.process_info()
    # a plan that is parsed stays as it is; in an elastic run its number of ranks may be another now
    size = here.size if environment.member() is None else None
    plan = plan_words.parse(words, size=size)
    with Stop(here.started_by != "manyhands", watched_file(plan, here)) as stop:
        store = run_store(here, plan.timeout_s)
        task, seed = resolve(make, plan.seed)
        if environment.member() is not None:
            return _work_in_epochs(plan, here, store, options, task, seed, stop)
        context = open_rank_context(plan, here, store, options)
        try:
            model = _model_of_rank(context, task)
            return _train(context, task, model, seed, stop)
        except ServerLost as e:
            reasons = filter(None, (str(e), context.server_failures()))
            raise ServerLost("\n".join(reasons)) from e
        finally:
            context.close()


def _train(
    context: RankContext, task: Task, model: nn.Module, seed: int, stop: Stop
) -> dict[str, Any]:
    run = Run(context)
    try:
        guard = step_guard.over_task(model.parameters(), context.process.size)
        with _round_of_failure([run]), step_guard.merged_steps(), guard:
            run.trainer = task_trainer(context, task, model, seed, stop, run)
            return {**dataclasses.asdict(run.trainer.loop()), "stopped_by": stop.notice}
    except SystemExit as e:
        if e.code:
            raise
        raise TaskError(
            "the task called sys.exit() in the middle of training, before its end and its last "
            "checkpoint; raise an error, or limit the run with steps= or until="
        ) from None


def _model_of_rank(context: RankContext, task: Task) -> nn.Module:
    """The model to start from; where ranks keep slices of it and a function makes it, with
    parameters that are made when they are sliced."""
    resumed = context.directory if context.options.resume else None
    slices = context.splits_model and context.plan.split != "by_feature"
    if not slices or isinstance(task.model, nn.Module | Mapping):
        return starting_model(task, resumed)
    model, why = unmade.deferred(functools.partial(build_model, task))
    if why:
        context.notice(f"every rank makes the whole model before it keeps its part: {why}")
    return starting_model(task, resumed, model)


def starting_model(
    task: Task, resumed: Path | None = None, model: nn.Module | None = None
) -> nn.Module:
    """The task's model (`model`, if it is made) with the weights to start from, which a run that
    goes on in the directory `resumed` does not need."""
    model = build_model(task) if model is None else model
    if task.init is None or (resumed is not None and Checkpoints(resumed / "checkpoints").all()):
        return model
    weights = task.init if isinstance(task.init, Weights) else Weights(task.init)
    if embeddings(model) and weights.has_tables:
        raise TaskError(
            f"init={weights.named} has rows of mh.Embedding, which are on servers and come from a "
            "resumed run only; resume it, or give the parameters as a state dict"
        )
    weights.load_into(model, unmade.load)
    return model


def _work_in_epochs(
    plan: Plan,
    here: ProcessInfo,
    store: dist.Store,
    options: Options,
    task: Task,
    seed: int,
    stop: Stop,
) -> dict[str, Any]:
    """The same in an elastic run: each group of ranks has a trainer of its own, with a model as it
    was at first, into which the state that was kept is loaded."""
    first = starting_model(task, Path(str(options.directory)) if options.resume else None)
    epochs = Epochs(plan, here, store, options)
    return epochs.run({}, lambda c: _train(c, task, copy.deepcopy(first), seed, stop))


def watched_file(plan: Plan, here: ProcessInfo) -> str | None:
    """Where our launcher started this process, the launcher looks for the file."""
    return None if here.started_by == "manyhands" else plan.preempt_file


@contextlib.contextmanager
def _round_of_failure(runs: list[Run]) -> Iterator[None]:
    """Note in an error at which round it came: one that comes back there would come again."""
    try:
        yield
    except BaseException as e:
        found = [run.trainer.round + 1 for run in runs if run.trainer is not None]
        if found:
            setattr(e, FAILED_ROUND, found[-1])
        raise


def run_store(here: ProcessInfo, timeout_s: float) -> dist.Store:
    """The rendezvous store of this process's next run: one job may hold several runs in turn."""
    _runs.append(f"run/{len(_runs)}")
    return dist.PrefixStore(_runs[-1], environment.store(here, timeout_s))


def work_script(
    script: str, arguments: list[str], words: Words, plan: Plan, options: Options
) -> dict[str, Any]:
    """One rank's whole life in a script: its `task()` if it defines one, else the script itself,
    which calls `join()` and may bring plan words of its own: `words` are those given outside it."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    seed_alike(plan.seed or 0)  # a script may draw its data while it is imported
    if defines_task(Path(script)):
        return work(load_task(script), plan, options)
    environment.hand_over(plan_words.line(words), options.to_json())
    step_guard.install(environment.process_info().size)
    before = len(_runs)
    try:
        with _round_of_failure(joined_runs):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        if e.code:
            raise
    finally:
        step_guard.remove()
    result = close_joined(draw=False)  # `start` draws
    if len(_runs) == before:
        raise TaskError(
            f"{script} has trained nothing under manyhands: it defines no task() and has called "
            "neither manyhands.join() nor manyhands.train(); define task(), or join the run"
        )
    return result or {}


def defines_task(script: Path) -> bool:
    """Whether the file has a `task` at its top level. The file is read, not run: running it may be
    the training itself."""
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
        with one_thread():  # a script may build its model while it is loaded
            made: MakeTask = runpy.run_path(script, run_name="manyhands.script")["task"]
        return made
    finally:
        _loading.pop()


def script_being_loaded() -> str | None:
    return _loading[-1] if _loading else None


def script_name() -> str:
    """Name of the running script, as the name of its run."""
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    unnamed = ("", "-c", "__main__", "ipykernel_launcher", "colab_kernel_launcher")
    return "run" if name in unnamed else name


def _pickle(body: Callable[[], Any]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(body))
    except Exception as e:
        if isinstance(e, ManyhandsError):
            raise
        raise TaskError(
            f"the task cannot be sent to other processes ({type(e).__name__}: {e}); make locks, "
            "sockets, open files and the like inside task(), not outside, or put the task into a "
            "file and use: manyhands run FILE"
        ) from e
