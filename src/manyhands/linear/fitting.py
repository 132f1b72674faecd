"""Fitting: run a solver here, or on the ranks of a plan, with one run directory and its events."""

from __future__ import annotations

import functools
import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.assembly.rank_context import Options, RankContext, open_rank_context
from manyhands.core import Event, Plan, Position, Snapshot
from manyhands.entry import run_store, start
from manyhands.errors import PlanError
from manyhands.launch import environment
from manyhands.launch.signals import Stop
from manyhands.linear.catalogue import SOLVERS
from manyhands.linear.certificate import Certificate
from manyhands.linear.fit_data import FitData, SharedFitData, shared
from manyhands.linear.minimise import RoundRecord, Solution, Stopping, minimise, start_at
from manyhands.linear.passes.rows import Array, threads_of
from manyhands.linear.spec import FitSpec
from manyhands.plan import words as plan_words
from manyhands.recover.checkpoint import find
from manyhands.split.data import rank_range

# words that a linear model honours; every other one is refused
KNOWN = {
    "data", "tensor", "threads", "split", "link", "timeout_s", "seed", "save", "keep", "grace_s",
    "stall_s", "preempt_file", "device",
}  # fmt: skip


@dataclass(frozen=True)
class Where:
    """Where a fit runs and what it writes."""

    plan: str = ""
    directory: str | None = None
    resume: bool = False
    quiet: bool = True


def parsed(words: str) -> Plan:
    """The plan; refuses words that have no effect on a linear model."""
    given = plan_words.overlay(words)
    strange = sorted(set(given) - KNOWN)
    if strange:
        raise PlanError(
            f"plan={words!r}: {', '.join(strange)} has no effect on a linear model; "
            f"{', '.join(sorted(KNOWN))} have"
        )
    if given.get("split", "auto") not in ("auto", "by_feature"):
        raise PlanError(
            f"split={given['split']}: rows are split over data= ranks as they are stored; "
            "leave it out, or split columns with tensor=K split=by_feature"
        )
    size = environment.process_info()
    return plan_words.parse(words, size=None if size.started_by == "alone" else size.size)


def by_feature(plan: Plan) -> bool:
    return plan.split == "by_feature"


def fit(spec: FitSpec, data: FitData, where: Where, theta: Array | None = None) -> Solution:
    """Minimise; on several ranks where the plan says so, with a run directory where one is asked
    for."""
    plan = parsed(where.plan)
    if plan.layout.size == 1 and where.directory is None and not where.resume:
        return _fit_here(spec, data, plan, theta)
    with shared(data) as handed, tempfile.TemporaryDirectory(prefix="manyhands-linear-") as folder:
        body = functools.partial(_rank_body, spec, handed, theta, folder)
        options = Options("linear", where.directory, where.resume, quiet=where.quiet)
        start(body, where.plan, options)
        return _read_solution(Path(folder), plan, data, spec)


def _fit_here(spec: FitSpec, data: FitData, plan: Plan, theta: Array | None) -> Solution:
    by_column = needs_columns(spec)
    source, y, c = data.part(0, 1, by_column)
    with threads_of(plan.threads or spec.threads) as threads:
        problem = spec.problem(source, y, c, threads, None, by_column)
        return minimise(problem, spec.solver, start_at(problem, theta), spec.stopping)


def needs_columns(spec: FitSpec) -> bool:
    return isinstance(spec.solver, SOLVERS["scd"].make)


# -- one rank --


def _rank_body(
    spec: FitSpec,
    handed: SharedFitData,
    theta: Array | None,
    folder: str,
    plan: Plan,
    options: Options,
) -> dict[str, Any]:
    """One rank's whole life in a fit; the solution goes into `folder`."""
    here = environment.process_info()
    with Stop(here.started_by != "manyhands") as stop:
        context = open_rank_context(plan, here, run_store(here, plan.timeout_s), options)
        try:
            return _rank_fit(spec, handed.open(), theta, folder, context, stop)
        finally:
            context.close()


def _rank_fit(
    spec: FitSpec,
    data: FitData,
    theta: Array | None,
    folder: str,
    context: RankContext,
    stop: Stop,
) -> dict[str, Any]:
    plan, group = context.plan, context.group
    columns = by_feature(plan) or needs_columns(spec)
    source, y, c = data.part(group.rank, group.size, columns)
    began = time.perf_counter()
    with threads_of(plan.threads or spec.threads) as threads:
        problem = spec.problem(source, y, c, threads, group, columns)
        own = _own_part(problem, data, theta, by_feature(plan), group)
        state, first = None, 0
        if context.options.resume:
            own, state, first = _restored(context, problem, spec)
        watch = Watch(context, stop, data, spec)
        watch.announce()
        every = Stopping(spec.stopping.tol, spec.stopping.max_iter, True)
        found = minimise(problem, spec.solver, start_at(problem, own), every, watch, state, first)
    watch.finish(found)
    np.savez(Path(folder) / f"rank-{group.rank}.npz", theta=found.theta)
    group.barrier()
    seconds = time.perf_counter() - began
    if context.leads:
        records = [vars(r) for r in found.history]
        report = {
            "rounds": found.rounds,
            "converged": found.converged,
            "objective": found.certificate.objective,
            "dual": found.certificate.dual,
            "history": records,
            "ranks": group.size,
            "directory": str(context.directory),
        }
        (Path(folder) / "solution.json").write_text(json.dumps(report))
    metrics = {"objective": found.certificate.objective, "gap": found.certificate.gap}
    return {
        "directory": str(context.directory),
        "rounds": found.rounds,
        "epochs": float(found.rounds),
        "seconds": seconds,
        "samples_per_s": len(data.y) * found.rounds / max(seconds, 1e-9),
        "metrics": metrics,
        "stopped": stop.requested,
        "checkpoint": str(context.checkpoints.last_good) if context.checkpoints.last_good else None,
        "ranks": group.size,
        "stopped_by": stop.notice,
    }


class Watch:
    """What happens after each certified round: events, a checkpoint, a request to stop."""

    def __init__(self, context: RankContext, stop: Stop, data: FitData, spec: FitSpec):
        self.context, self.stop, self.data, self.spec = context, stop, data, spec

    def announce(self) -> None:
        context, spec = self.context, self.spec
        if not context.leads:
            return
        context.write_plan(plan_words.to_toml(context.plan))
        size = f"{len(self.data.y):,} rows, {self.data.columns:,} columns"
        texts = {
            "start": f"{plan_words.brief(context.plan)} solver={type(spec.solver).__name__}",
            "model": f"linear model; {size}, {self.data.nonzeros:,} non-zeros; "
            f"{context.group.size} ranks over {context.group_name}",
            "run": str(context.directory),
        }
        for name, text in texts.items():
            context.recorder.emit(Event(time.time(), 0, 0, name, value=text))
        context.recorder.flush()

    def __call__(self, record: RoundRecord, theta: Array, state: dict[str, Array]) -> bool:
        context = self.context
        context.group.round = record.round
        value = {
            "epoch": float(record.round),
            "step": float(record.round),
            "objective": record.objective,
            "seconds": record.seconds,
            "nbytes": float(record.nbytes),
        }
        if math.isfinite(record.gap):
            value["gap"] = record.gap
        context.recorder.emit(
            Event(time.time(), context.group.rank, record.round, "evaluate", 0.0, 0, value)
        )
        context.recorder.flush()
        asked = np.array([float(self.stop.requested > 0)])
        context.group.all_reduce({"stop": torch.from_numpy(asked)}, op="max").wait()
        stopping = bool(asked[0])
        every = context.plan.save
        due = every == "epoch" or (every.isdigit() and record.round % int(every) == 0)
        if every != "off" and (due or stopping):
            self._save(record, theta, state)
        return stopping

    def _save(self, record: RoundRecord, theta: Array, state: dict[str, Array]) -> None:
        """theta and the solver's state of every rank, gathered by rank 0."""
        group = self.context.group
        own = {"theta": torch.from_numpy(theta).clone()}
        for name, value in state.items():
            own[f"shape/{name}"] = torch.tensor(np.atleast_1d(value).shape, dtype=torch.float64)
            own[f"state/{name}"] = torch.from_numpy(np.atleast_1d(value).astype(np.float64))
        everyone = gathered(own, group)
        if group.rank == 0:
            ranks = {f"{r}/{k}": v for r, part in enumerate(everyone) for k, v in part.items()}
            position = Position(record.round, 0, record.round)
            meta = {"linear": True, "ranks": group.size, "solver": type(self.spec.solver).__name__}
            saved = Snapshot(record.round, {"theta": own["theta"]}, {}, {}, position, {}, meta, ranks)
            self.context.checkpoints.save(saved, {"objective": record.objective})

    def finish(self, found: Solution) -> None:
        self.context.checkpoints.wait()
        if self.context.leads:
            value = {"objective": found.certificate.objective}
            if math.isfinite(found.certificate.gap):
                value["gap"] = found.certificate.gap
            self.context.recorder.emit(
                Event(time.time(), 0, found.rounds, "finish", 0.0, 0, value)
            )
        self.context.recorder.flush()


def gathered(own: dict[str, torch.Tensor], group: Any) -> list[dict[str, torch.Tensor]]:
    """Rank 0: the tensors of every rank; their shapes may differ from rank to rank."""
    if group.size == 1:
        return [own]
    lengths = torch.zeros(group.size, len(own), dtype=torch.int64)
    lengths[group.rank] = torch.tensor([v.numel() for v in own.values()])
    group.all_reduce({"lengths": lengths}).wait()
    found = [own]
    if group.rank == 0:
        for r in range(1, group.size):
            into = torch.zeros(int(lengths[r].sum()), dtype=torch.float64)
            group.transfer({}, {r: into}).wait()
            parts = torch.split(into, lengths[r].tolist())
            found.append(dict(zip(own, parts, strict=True)))
    else:
        flat = torch.cat([v.to(torch.float64).reshape(-1) for v in own.values()])
        group.transfer({0: flat}, {}).wait()
    return found


def _own_part(
    problem: Any, data: FitData, theta: Array | None, split_columns: bool, group: Any
) -> Array | None:
    """Of a start for all columns, this rank's: its columns and the intercept."""
    if theta is None or not split_columns:
        return theta
    own = rank_range(data.columns, group.rank, group.size)
    return np.concatenate((theta[own.start : own.stop], theta[data.columns :]))


def _restored(
    context: RankContext, problem: Any, spec: FitSpec
) -> tuple[Array, dict[str, Array] | None, int]:
    """theta, the solver's state and the round of the newest checkpoint."""
    _, saved = find(context.directory)
    if not saved.meta.get("linear"):
        raise PlanError(f"{context.directory} is no run of a linear model; give another directory")
    if saved.meta["solver"] != type(spec.solver).__name__:
        raise PlanError(
            f"{context.directory} was fitted by {saved.meta['solver']}, this is "
            f"{type(spec.solver).__name__}; take the same solver, or start anew with warm_start"
        )
    group = context.group
    if saved.meta["ranks"] != group.size:
        if by_feature(context.plan):
            raise PlanError(
                f"{context.directory} has columns of {saved.meta['ranks']} ranks, this run has "
                f"{group.size}; resume with as many"
            )
        # the state belongs to each rank's rows: other ranks start from theta alone
        return saved.params["theta"].numpy().copy(), None, saved.round
    prefix = f"{group.rank}/state/"
    state = {}
    for name, value in saved.ranks.items():
        if name.startswith(prefix):
            key = name.removeprefix(prefix)
            shape = [int(n) for n in saved.ranks[f"{group.rank}/shape/{key}"].tolist()]
            state[key] = value.numpy().reshape(shape).copy()
    return saved.ranks[f"{group.rank}/theta"].numpy().copy(), state, saved.round


def _read_solution(folder: Path, plan: Plan, data: FitData, spec: FitSpec) -> Solution:
    report = json.loads((folder / "solution.json").read_text())
    parts = [np.load(folder / f"rank-{r}.npz")["theta"] for r in range(report["ranks"])]
    theta = parts[0]
    if by_feature(plan):
        owns = [len(p) - spec.intercept for p in parts]
        theta = np.concatenate([p[:n] for p, n in zip(parts, owns, strict=True)])
        if spec.intercept:
            theta = np.append(theta, parts[0][-1])
    history = [RoundRecord(**record) for record in report["history"]]
    found = Certificate(report["objective"], report["dual"])
    solution = Solution(theta, report["rounds"], report["converged"], found, history)
    solution.directory = report["directory"]
    return solution
