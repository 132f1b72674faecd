"""`manyhands join RUN` and `manyhands scale RUN data=6`: who takes part in an elastic run."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

from manyhands.assembly.rank_context import Options
from manyhands.assembly.regroup.elastic_job import needs
from manyhands.entry import work_script
from manyhands.errors import LaunchError, PlanError
from manyhands.launch import environment
from manyhands.launch.elastic.outside_process import birth_of
from manyhands.launch.elastic.run_requests import Rendezvous, ask, difference, find
from manyhands.launch.rank_report import run_as_rank
from manyhands.launch.signals import Stop
from manyhands.plan import words as plan_words


def scale(run: Path, words: list[str]) -> int:
    """Ask for another number of replicas."""
    given = plan_words.overlay(words)
    if list(given) != ["data"] or not str(given["data"]).isdigit():
        raise PlanError(
            f"{' '.join(words) or 'nothing'} was given; needed: data=NUMBER of replicas alone"
        )
    answer = ask(find(run), {"verb": "scale", "data": int(given["data"])})
    print(
        f"data={answer['data']}, {answer['before']} before: ranks come and go at the next boundary "
        "of a round"
    )
    return 0


def join(run: Path, script: Path | None, words: list[str]) -> int:
    """This process becomes a rank of the run."""
    found = find(run)
    run_has = found.needs
    path = script or Path(run_has["script"] or "-")
    if not run_has["script"]:
        raise LaunchError(
            f"{run} was started from Python, with a task that only its own processes have; start "
            "it as manyhands run FILE, so that others can join",
            2,
        )
    if not path.is_file():
        raise LaunchError(
            f"the run trains {path}, which is not on this machine; copy it here and give its path: "
            "manyhands join RUN FILE",
            2,
        )
    options = Options(script=str(path), words=run_has["words"])
    has = needs(options)
    if words:
        has["words"] = plan_words.line(words)
    if why := difference(run_has, has):
        raise LaunchError(f"refused: {why}; join with what the run has", 2)
    return _become_a_rank(found, path, has)


def _become_a_rank(found: Rendezvous, script: Path, has: dict[str, Any]) -> int:
    here = environment.process_info({})
    answer = ask(
        found,
        {
            "verb": "join",
            "has": {k: has[k] for k in ("version", "torch", "python", "words", "digest")},
            "pid": os.getpid(),
            "host": here.host,
            "machine": here.machine,
            "born": birth_of(os.getpid()),
        },
    )
    member = answer["member"]
    environment.take_part(found.address, found.port, found.token, member, found.launcher)
    plain = {k: v for k, v in json.loads(found.needs["options"]).items() if k != "arguments"}
    options = dataclasses.replace(Options(**plain), held=True)
    words = found.needs["words"]
    plan = plan_words.parse(words)
    work = functools.partial(
        work_script, str(script), found.needs["arguments"], words, plan, options
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher asks the ranks to stop
    with Stop(interrupt=False):
        return run_as_rank(work)
