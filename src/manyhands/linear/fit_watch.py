"""Fit watch: what happens after each round of a run: events, lines, a checkpoint, a stop."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from typing import Any, TextIO

import torch

from manyhands.assembly.rank_context import RankContext
from manyhands.core import Event
from manyhands.launch.signals import Stop
from manyhands.linear import fit_checkpoint
from manyhands.linear.fit_checkpoint import FitIdentity
from manyhands.linear.minimise import FitRound, Solution, Standing
from manyhands.observe.progress import open_screen
from manyhands.observe.text import number, took
from manyhands.plan import words as plan_words

SAVE_EVERY_S = 60.0  # where the plan says nothing about save=
FLUSH_EVERY_S = 0.5
LINE_EVERY_S = 1.0


class RoundLines:
    """Lines about rounds, one a second at most, and about the end. Where a round was not certified
    it is the solver's estimate of the gap that is shown."""

    def __init__(self, stream: TextIO):
        self._screen = open_screen(stream)
        self._shown_s = -math.inf

    def begin(self, text: str) -> None:
        self._screen.line("fit", text, "bold")

    def round(self, record: FitRound) -> None:
        now = time.monotonic()
        if now - self._shown_s < LINE_EVERY_S:
            return
        self._shown_s = now
        parts = [took(record.seconds)]
        if math.isfinite(record.objective):
            parts.append(f"objective {number(record.objective)}")
        if math.isfinite(record.gap):
            parts.append(f"gap {number(record.gap)}")
        elif math.isfinite(record.estimate):
            parts.append(f"gap about {number(record.estimate)}")
        self._screen.line(f"round {record.round}", "  ".join(parts), "cyan")
        self._screen.refresh()

    def end(self, found: Solution) -> None:
        gap = found.certificate.gap
        said = f"gap {number(gap)}" if math.isfinite(gap) else "no bound on the gap"
        state = "converged" if found.converged else "stopped"
        text = f"{state} after {found.rounds} rounds: objective "
        text += f"{number(found.certificate.objective)}, {said}"
        self._screen.line("done", text, "bold green" if found.converged else "yellow")
        self._screen.refresh()
        self._screen.end()


def describe(solver: Any, data: Any, ranks: int = 1, link: str = "") -> str:
    """What is fitted by what, in one line."""
    rows = f"{len(data.y):,} rows, {data.columns:,} columns, {data.nonzeros:,} non-zeros"
    where = f"; {ranks} ranks over {link}" if ranks > 1 else ""
    return f"{type(solver).__name__} on {rows}{where}"


class FitWatch:
    """Called by `minimise` after each round, on every rank; True: stop."""

    def __init__(
        self,
        context: RankContext,
        stop: Stop,
        identity: FitIdentity,
        problem: Any,
        saves: bool,
        every: str | None,
        lines: bool,
    ):
        """`saves`: the directory is there to stay; `every`: save= where the plan says it."""
        self.context, self.stop, self.identity = context, stop, identity
        self.problem = problem
        self.saves = saves and every != "off"
        self.every = every
        self.lines = RoundLines(sys.stdout) if lines and context.leads else None
        self.saved_round, self.stopped = -1, 0
        self._saved_s = self._flushed_s = time.monotonic()
        self._before = (0.0, 0)  # seconds and bytes at the end of the round before

    def begin(self, at: Standing, text: str) -> None:
        context = self.context
        self._before = (at.seconds, at.nbytes)
        self.saved_round = at.rounds if at.rounds else -1
        context.group.round = at.rounds + 1
        if not context.leads:
            return
        context.write_plan(plan_words.to_toml(context.plan))
        plan = dataclasses.replace(context.plan, device="auto")  # always the CPU: not worth a word
        words = f"{plan_words.brief(plan)} solver={self.identity.spec.solver!r}"
        told = fit_checkpoint.model_of(self.identity.spec) | self.identity.digests
        texts = {
            "start": words,
            "model": text,
            "objective": json.dumps(told),  # by which runs that compare are told
            "run": str(context.directory),
        }
        for name, said in texts.items():
            context.recorder.emit(Event(time.time(), 0, at.rounds, name, value=said))
        context.recorder.flush()
        if self.lines is not None:
            self.lines.begin(text)

    def __call__(self, record: FitRound, at: Standing) -> bool:
        self._tell(record, at)
        asked = torch.tensor([float(self.stop.requested), float(self._due(record))])
        # of the group that is not observed: no part of what the solver sends
        self.context.group.group.all_reduce({"asked": asked}, op="max").wait()
        self.stopped, due = int(asked[0]), bool(asked[1])
        if self.saves and (due or self.stopped):
            self._save(at)
        if self.lines is not None:
            self.lines.round(record)
        self.context.group.round = record.round + 1
        return self.stopped > 0

    def _due(self, record: FitRound) -> bool:
        if not self.saves:
            return False
        if self.every is None:
            return time.monotonic() - self._saved_s > SAVE_EVERY_S
        return self.every == "epoch" or record.round % int(self.every) == 0

    def _save(self, at: Standing) -> None:
        solver, state = self.identity.spec.solver, at.state or {}
        if hasattr(solver, "captured"):  # part of it is not in `state` while the run goes on
            state = solver.captured(self.problem, state)
        fit_checkpoint.save(self.context, self.identity, at, state)
        self.saved_round, self._saved_s = at.rounds, time.monotonic()

    def _tell(self, record: FitRound, at: Standing) -> None:
        """The round's events; the certificate's share of it is an evaluation."""
        context, now = self.context, time.time()
        rank, emit = context.group.rank, context.recorder.emit
        seconds = record.seconds - self._before[0]
        nbytes = record.nbytes - self._before[1]
        self._before = (record.seconds, record.nbytes)
        began = now - seconds
        emit(Event(began, rank, record.round, "round", seconds - record.certify_s, nbytes))
        where = {"epoch": float(record.round), "step": float(record.round)}
        told = {"nbytes": float(record.nbytes), "seconds": record.seconds}
        if math.isfinite(record.estimate):
            told["estimate"] = record.estimate
        if not math.isnan(record.objective):
            value: dict[str, float] | None = None
            if context.leads:
                trained_s = record.seconds - sum(r.certify_s for r in at.history)
                value = {**where, "objective": record.objective, **_gaps(record, at)}
                value |= {"seconds": trained_s, "sent": float(record.nbytes)}
            start = now - record.certify_s
            emit(Event(start, rank, record.round, "evaluate", record.certify_s, 0, value))
        if context.leads:
            emit(Event(now, 0, record.round, "progress", value={**where, **told}))
        if time.monotonic() - self._flushed_s > FLUSH_EVERY_S:
            context.recorder.flush()
            self._flushed_s = time.monotonic()

    def finish(self, at: Standing, found: Solution) -> None:
        if self.saves and self.saved_round != at.rounds:
            self._save(at)
        context = self.context
        context.checkpoints.wait()
        if context.leads:
            value = {"objective": found.certificate.objective, "converged": float(found.converged)}
            if math.isfinite(found.certificate.gap):
                value["gap"] = found.certificate.gap
            context.recorder.emit(Event(time.time(), 0, found.rounds, "finish", value=value))
        context.recorder.flush()
        if self.lines is not None:
            self.lines.end(found)


def _gaps(record: FitRound, at: Standing) -> dict[str, float]:
    if not math.isfinite(record.gap):
        return {}
    return {"gap": record.gap, "relative_gap": record.gap / at.null}
