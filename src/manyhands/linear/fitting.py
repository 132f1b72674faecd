"""Fitting: run a solver here, or on the ranks of a plan, with one run directory and its events.

plan=""                       this process, also under torchrun or `manyhands run`
plan="data=2"                 alone: two processes are started here, which map one copy of the
                              data; under torchrun or `manyhands run`: the ranks of that job
plan="tensor=2 split=by_feature"    the same, each rank with its columns of all rows
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.assembly.rank_context import Options, RankContext, open_rank_context
from manyhands.assembly.tables import connect_store
from manyhands.core import Group, Plan, ProcessInfo, Result
from manyhands.entry import run_store, start, watched_file, whole_restarts, with_saved_words
from manyhands.errors import LaunchError, PlanError
from manyhands.launch import environment
from manyhands.launch.signals import Stop
from manyhands.linear import fit_checkpoint
from manyhands.linear.certificate import Certificate
from manyhands.linear.fit_checkpoint import FitIdentity
from manyhands.linear.fit_data import FitData, SharedFitData, shared
from manyhands.linear.fit_plan import (
    Where,
    by_feature,
    check_servers,
    check_words,
    needs_columns,
    parsed,
)
from manyhands.linear.fit_watch import FitWatch, RoundLines, describe
from manyhands.linear.minimise import FitRound, Solution, Standing, minimise, start_at
from manyhands.linear.passes.rows import Array, threads_of
from manyhands.linear.spec import FitSpec
from manyhands.observe import convergence
from manyhands.observe.events import say
from manyhands.plan import words as plan_words


def fit(spec: FitSpec, data: FitData, where: Where, theta: Array | None = None) -> Solution:
    """Minimise; on several ranks where the plan says so, with a run directory where one is asked
    for."""
    here = environment.process_info()
    where = _launched_words(where, here)
    given = plan_words.overlay(where.plan)
    where = _continued_words(where, here)
    plan = parsed(where.plan)
    check_words(given, where, plan, here)
    if hasattr(spec.solver, "prepared"):
        solver = spec.solver.prepared(spec.stopping.max_iter)
        spec = dataclasses.replace(spec, solver=solver)
    check_servers(spec, plan)
    if plan.layout.size == 1 and where.directory is None and not plan.servers:
        return _fit_here(spec, data, plan, theta, where.quiet)
    alone, keeps = here.started_by == "alone", where.directory is not None
    launched = alone and (plan.layout.size > 1 or whole_restarts(plan) > 0)
    checked = fit_checkpoint.digests(data) if keeps or not alone else {}
    identity = FitIdentity(spec, checked, data.columns, by_feature(plan))
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="manyhands-fit-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(made))
        handed: Any = stack.enter_context(shared(data)) if launched else data
        report = Report(str(folder / "report.npz") if launched else "")
        rank = RankFit(identity, handed, theta, report, keeps, where.quiet)
        directory, by = where.directory or str(folder / "run"), ""
        try:
            start(rank, where.plan, Options("linear", directory, where.resume, quiet=True))
        except LaunchError as e:
            if not report.told().get("stopped"):
                raise
            by = str(e).partition(";")[0]  # what the launcher was asked by, not what it sent on
        found, told = report.read()
    if told["stopped"]:
        raise _stopped(plan, keeps, told, by)
    found.directory = told["directory"] if keeps else ""
    if keeps and here.rank == 0:
        _draw(Path(found.directory), where.quiet)
    return found


def _launched_words(where: Where, here: ProcessInfo) -> Where:
    """With the words and the directory that `manyhands run` was given, which win over those of the
    estimator."""
    if here.started_by != "manyhands" or not where.plan.strip():
        return where
    asked = Options(directory=where.directory, resume=where.resume)
    asked = asked.overlaid(environment.options())
    words = plan_words.line(plan_words.overlay(where.plan, environment.words()))
    return dataclasses.replace(where, plan=words, directory=asked.directory, resume=asked.resume)


def _continued_words(where: Where, here: ProcessInfo) -> Where:
    """With the words of the run to go on with, where none are given in their place."""
    if not where.resume or where.directory is None:
        return where
    size = None if here.started_by == "alone" else here.size
    known, _ = with_saved_words(where.plan, Options("linear", where.directory, True), size)
    return dataclasses.replace(where, plan=plan_words.line(known))


def _fit_here(
    spec: FitSpec, data: FitData, plan: Plan, theta: Array | None, quiet: bool
) -> Solution:
    by_column = needs_columns(spec)
    source, y, c = data.part(0, 1, by_column)
    lines = None if quiet else RoundLines(sys.stdout)

    def show(record: FitRound, at: Standing) -> bool:
        assert lines is not None
        lines.round(record)
        return False

    with threads_of(plan.threads or spec.threads, source) as threads:
        problem = spec.problem(source, y, c, threads, None, by_column)
        begun = start_at(problem, theta)
        if lines is None:
            return minimise(problem, spec.solver, begun, spec.stopping)
        lines.begin(describe(spec.solver, data))
        found = minimise(problem, spec.solver, begun, spec.stopping, show)
        lines.end(found)
        return found


def _stopped(plan: Plan, keeps: bool, told: dict[str, Any], by: str) -> LaunchError:
    by = by or f"stopped by {told['stopped_by'] or signal.Signals(told['stopped']).name}"
    if not keeps:
        do = "nothing was saved; give the estimator a directory to go on from"
    elif plan.save == "off":
        do = "nothing was saved (save=off)"
    else:
        do = f"go on with directory={told['directory']!r}, resume=True"
    number = signal.SIGINT if by.endswith("SIGINT") else told["stopped"]
    return LaunchError(f"{by} after {told['rounds']} rounds: {do}", 128 + number)


def _draw(directory: Path, quiet: bool) -> None:
    try:
        picture = convergence.draw([directory], directory / "curves.png")
    except Exception as e:  # a picture must never fail a fit
        say(f"no picture: {e}")
        return
    if not quiet:
        print(f"{'picture':<12}{picture}")


# -- one rank --


class Report:
    """What a fit found: kept here, or in a file where other processes find it."""

    def __init__(self, file: str = ""):
        self.file = file
        self._kept: tuple[Solution, dict[str, Any]] | None = None

    def write(self, found: Solution, told: dict[str, Any]) -> None:
        if not self.file:
            self._kept = found, told
            return
        told |= {
            "converged": found.converged,
            "certificate": dataclasses.astuple(found.certificate),
            "history": [dataclasses.astuple(record) for record in found.history],
        }
        np.savez(self.file, theta=found.theta, told=json.dumps(told))

    def told(self) -> dict[str, Any]:
        """{}: there is no report."""
        if self._kept is not None:
            return self._kept[1]
        if not self.file or not Path(self.file).exists():
            return {}
        with np.load(self.file) as written:
            return dict(json.loads(str(written["told"])))

    def read(self) -> tuple[Solution, dict[str, Any]]:
        if self._kept is not None:
            return self._kept
        told = self.told()
        with np.load(self.file) as written:
            theta = written["theta"]
        history = [FitRound(*record) for record in told["history"]]
        certificate = Certificate(*told["certificate"])
        found = Solution(theta, told["rounds"], told["converged"], certificate, history)
        return found, told


@dataclass
class RankFit:
    """One rank's whole life in a fit: what `start` runs on every rank."""

    identity: FitIdentity
    data: FitData | SharedFitData
    theta: Array | None  # to begin at, of all columns
    report: Report
    keeps: bool  # the directory stays
    quiet: bool

    def __call__(self, plan: Plan, options: Options) -> dict[str, Any]:
        here = environment.process_info()
        data = self.data.open() if isinstance(self.data, SharedFitData) else self.data
        plan = dataclasses.replace(plan, device="cpu")
        with Stop(here.started_by != "manyhands", watched_file(plan, here)) as stop:
            context = open_rank_context(plan, here, run_store(here, plan.timeout_s), options)
            try:
                found = self._run(context, data, stop)
                context.group.group.barrier()  # of all ranks, without an event
            finally:
                context.close()
                if not self.keeps and not self.report.file:
                    shutil.rmtree(context.directory, ignore_errors=True)  # of this host
        # without a directory `start` draws nothing: this run has a picture of its own
        ended = Result("", found.rounds, 0.0, 0.0, 0.0, {}, stop.requested, stopped_by=stop.notice)
        return dataclasses.asdict(ended)

    def _run(self, context: RankContext, data: FitData, stop: Stop) -> Solution:
        plan, group, spec = context.plan, context.group, self.identity.spec
        columns = self.identity.by_feature or needs_columns(spec)
        if context.process.started_by != "alone":
            _check_alike(self.identity.digests, group)
        source, y, c = data.part(group.rank, group.size, columns)
        stopping = dataclasses.replace(spec.stopping, spaced=self.keeps)
        every = plan_words.overlay(context.options.words).get("save")
        with threads_of(plan.threads or spec.threads, source) as threads:
            problem = spec.problem(source, y, c, threads, group, columns)
            if plan.servers:
                problem.store, _ = connect_store(context, plan)
            at = self._standing(context, problem)
            watch = FitWatch(
                context, stop, self.identity, problem, self.keeps, every, not self.quiet
            )
            watch.begin(at, describe(spec.solver, data, group.size, context.group_name))
            found = minimise(problem, spec.solver, at.theta, stopping, watch, at)
            found.theta = self.identity.whole(found.theta, group)
            watch.finish(at, found)
        if context.leads or not self.report.file:
            told = {"rounds": found.rounds, "stopped": watch.stopped, "stopped_by": stop.notice}
            self.report.write(found, {**told, "directory": str(context.directory)})
        return found

    def _standing(self, context: RankContext, problem: Any) -> Standing:
        solver = self.identity.spec.solver
        if context.options.resume:
            at = fit_checkpoint.restore(context, self.identity)
            if context.plan.servers and at.state is not None:
                solver.open_tables(problem, at.theta, at.state)
            return at
        theta = self.theta
        if theta is not None:
            theta = self.identity.own_part(theta, context.group)
        return Standing(start_at(problem, theta))


def _check_alike(digests: dict[str, int], group: Group) -> None:
    """Every rank of a job was given the same data; each fits its own part of it."""
    own = torch.tensor([float(crc) for crc in digests.values()], dtype=torch.float64)
    both = torch.cat((own, -own))
    group.all_reduce({"digests": both}, op="max").wait()
    most, least = both[: len(own)], -both[len(own) :]
    others = [name for name, a, b in zip(digests, most, least, strict=True) if a != b]
    if others:
        raise PlanError(
            f"the {group.size} ranks of this job were given different {' and '.join(others)}; give "
            "all of them the same: each fits its own part, and they have to agree about the whole"
        )
