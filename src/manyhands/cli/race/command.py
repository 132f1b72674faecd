"""Race command: run every plan with every seed until it reaches the target, then report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import cloudpickle

from manyhands.assembly.rank_context import Options
from manyhands.cli.race import ddp
from manyhands.cli.race.race_plans import RacePlan, TaskFacts, parse_plans, task_facts
from manyhands.cli.race.report import (
    OUTCOME,
    gather,
    outcome,
    report,
    run_folder,
    run_result,
    summary,
)
from manyhands.cli.race.request import RACE, choose_directory, resolve_request
from manyhands.core import Goal, Job
from manyhands.entry import defines_task, load_task, work_script
from manyhands.errors import LaunchError, ManyhandsError, PlanError
from manyhands.launch import environment, lab
from manyhands.observe import curves
from manyhands.observe.race import live, text_table
from manyhands.observe.race.results import Race, parse_target
from manyhands.plan import words as plan_words
from manyhands.recover import directory

REACHED_ALL, FAILED, NOT_REACHED = 0, 1, 3  # exit codes


def race(
    script: Path,
    plans: Sequence[str],
    target: str | None,
    *,
    seeds: int | None = None,
    common: Sequence[str] = (),
    folder: Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    base: Path = Path("runs"),
    arguments: Sequence[str] = (),
) -> tuple[Race, Path]:
    """Run all plans, write the report into the race directory, and return results and directory.

    `arguments`: the script's own, which it finds in sys.argv."""
    if environment.process_info().started_by != "alone":
        raise LaunchError(
            "race starts the processes of every plan itself; "
            "call it alone, not under torchrun, srun or mpirun"
        )
    if not defines_task(script):
        raise PlanError(
            f"{script} defines no task(), which race needs to run it under every plan; "
            "wrap model, data and optimizer into task()"
        )
    path = choose_directory(base, script.stem, folder, resume)
    earlier = path if resume else None
    request = resolve_request(earlier, script, plans, target, seeds, common, arguments)
    goal = parse_target(request["target"])
    racing = parse_plans(request["plans"], request["with"], goal)
    facts = task_facts(script, goal, request["arguments"])
    owner = directory.claim(path)
    try:
        (path / RACE).write_text(
            json.dumps(request | {"facts": dataclasses.asdict(facts)}, indent=1) + "\n"
        )
        return _run_all(path, script, request, goal, racing, facts, quiet)
    finally:
        owner.close()


def _run_all(
    path: Path,
    script: Path,
    request: dict[str, Any],
    goal: Goal,
    plans: list[RacePlan],
    facts: TaskFacts,
    quiet: bool,
) -> tuple[Race, Path]:
    stream = None if quiet else sys.stdout
    live.line(
        stream,
        "race",
        f"{path}: {len(plans)} plans to {request['target']}, seeds: {request['seeds']}",
    )
    # seed by seed: a busy minute of the machine affects all plans, and each has a result early
    for k in range(request["seeds"]):
        for i, plan in enumerate(plans, 1):
            run = run_folder(path, plan, k)
            what = f"plan {i} of {len(plans)}, seed {k + 1} of {request['seeds']}: {plan.label}"
            if outcome(run).get("state") == "done":
                live.line(stream, "race", f"{what} (done before)")
                continue
            live.line(stream, "race", what)
            try:
                first = facts.seed if plan.plan.seed is None else plan.plan.seed
                _run_one(script, request["arguments"], plan, first + k, run, goal, stream)
            except KeyboardInterrupt:
                words = shlex.join(
                    ["manyhands", "race", str(script), "--resume", "--dir", str(path)]
                )
                raise LaunchError(
                    f"stopped in plan {i} of {len(plans)}, seed {k + 1}; continue with: {words}",
                    130,
                ) from None
            live.line(stream, *summary(run_result(run, facts, goal), goal))
    found = gather(path, plans, request["seeds"], facts, goal)
    report(found, path, script, request, facts, quiet)
    return found, path


def verb(
    script: Path,
    plans: list[str],
    target: str | None,
    seeds: int | None,
    common: list[str],
    folder: Path | None,
    resume: bool,
    quiet: bool,
    arguments: list[str],
) -> int:
    """The race, and its exit code."""
    found, _ = race(
        script,
        plans,
        target,
        seeds=seeds,
        common=common,
        folder=folder,
        resume=resume,
        quiet=quiet,
        arguments=arguments,
    )
    if text_table.failures(found):
        return FAILED
    return REACHED_ALL if all(e.num_reached == len(e.runs) for e in found.entries) else NOT_REACHED


def _run_one(
    script: Path,
    arguments: list[str],
    racing: RacePlan,
    seed: int,
    run: Path,
    goal: Goal,
    stream: TextIO | None,
) -> None:
    """Run one plan with one seed in new processes, even if it is one: no earlier run affects it."""
    shutil.rmtree(run, ignore_errors=True)  # files of an interrupted or failed run
    run.mkdir(parents=True)
    plan, words = racing.plan, plan_words.overlay(racing.words, {"seed": seed})
    options = Options(script.stem, str(run), quiet=True)
    body = (
        functools.partial(
            ddp.work, functools.partial(load_beside, str(script), arguments), words, options
        )
        if racing.is_ddp
        else functools.partial(
            work_script, str(script), arguments, words, plan_words.parse(words), options
        )
    )
    launched_s = time.time()
    ended: dict[str, Any] = {"state": "done", "launched_s": launched_s, "seed": seed}
    try:
        with live.RaceWatch(run, goal, stream):
            result = lab.launcher().launch(
                Job(plan.layout.size, bytes(cloudpickle.dumps(body)), plan.threads)
            )
    except ManyhandsError as e:
        if isinstance(e, LaunchError) and str(e).startswith("stopped by "):
            raise KeyboardInterrupt from None
        ended |= {"state": "failed", "error": first_error_line(str(e)), "text": str(e)}
    else:
        if result.get("stopped"):
            raise KeyboardInterrupt
        with contextlib.suppress(Exception):  # a picture that fails must not end a race
            curves.draw(run)
    (run / OUTCOME).write_text(json.dumps(ended, indent=1) + "\n")


def load_beside(script: str, arguments: list[str]) -> Any:
    """Load the task of a script whose imports are in its own folder."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    return load_task(script)


def first_error_line(text: str) -> str:
    """The error message in one line, without its rank and its stack."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and re.fullmatch(r"rank \d+ failed:", lines[0]):
        lines = lines[1:]
    if lines and lines[0].startswith("Traceback"):
        errors = [
            line
            for line in lines
            if re.match(r"[\w.]+(Error|Exception|Interrupt|Warning|Exit)\b", line)
        ]
        lines = errors[-1:] or lines[-1:]
    return lines[0] if lines else "no message"
