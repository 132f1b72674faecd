"""Faults of a run, as the command line names them: KIND[:INDEX]@TIME[/DURATION].

--kill server@20s           any server, 20 s after training began
--kill worker@random        at a time drawn from the seed, in the middle of the run
--pause server:1@5s/3s      the second live server, for 3 s
--cut server:0@8s           all of its connections at once; the process lives
--full-disk 6s/4s           nothing can be written for 4 s
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from manyhands.core import Plan
from manyhands.errors import PlanError

Kind = Literal["kill", "pause", "cut", "full-disk"]
TARGETS: dict[str, tuple[str, ...]] = {
    "kill": ("server", "worker", "coordinator"),
    "pause": ("server", "worker", "coordinator"),
    "cut": ("server",),
}
LASTING = ("pause", "full-disk")
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
MIDDLE = (0.2, 0.8)  # of the undisturbed run: where random times are
EXAMPLES = {
    "kill": "server@20s, worker@random or coordinator@500ms",
    "pause": "server:1@5s/3s",
    "cut": "server:0@8s",
    "full-disk": "6s/4s",
}


@dataclass(frozen=True)
class Fault:
    """`index`: of the live servers, or a worker's rank; None: any. `at_s` counts from the begin of
    training; None: at random."""

    kind: Kind
    target: str  # "": the disk
    index: int | None
    at_s: float | None
    duration_s: float = 0.0

    def __str__(self) -> str:
        which = self.target if self.index is None else f"{self.target}:{self.index}"
        when = "random" if self.at_s is None else f"{self.at_s:g}s"
        lasts = f"/{self.duration_s:g}s" if self.duration_s else ""
        return f"{self.kind} {which}{'@' if which else ''}{when}{lasts}"


@dataclass(frozen=True)
class TimedFault:
    """A fault with its time, drawn where it was random."""

    fault: Fault
    at_s: float


def parse_fault(kind: Kind, text: str) -> Fault:
    if kind == "full-disk":
        when, slash, lasts = text.partition("/")
        target, index = "", None
    else:
        target, index, rest = _target(kind, text)
        when, slash, lasts = rest.partition("/")
    if slash and kind not in LASTING:
        raise _bad(kind, text, f"a {kind} has no duration")
    if not slash and kind in LASTING:
        raise _bad(kind, text, "its duration is missing: TIME/DURATION")
    at_s = None if when == "random" else parse_seconds(when, f"--{kind} {text}")
    duration_s = parse_seconds(lasts, f"--{kind} {text}") if slash else 0.0
    if slash and duration_s == 0:
        raise _bad(kind, text, "a duration of 0 breaks nothing")
    return Fault(kind, target, index, at_s, duration_s)


def _target(kind: Kind, text: str) -> tuple[str, int | None, str]:
    which, at, rest = text.partition("@")
    target, colon, index = which.partition(":")
    if target not in TARGETS[kind]:
        known = ", ".join(TARGETS[kind])
        raise _bad(kind, text, f"{target or 'nothing'} cannot be its target; known: {known}")
    if colon and (target == "coordinator" or not re.fullmatch(r"\d+", index)):
        what = "there is one coordinator" if target == "coordinator" else "its number is no number"
        raise _bad(kind, text, what)
    if not at:
        raise _bad(kind, text, "its time is missing: @TIME")
    return target, int(index) if colon else None, rest


def _bad(kind: str, text: str, why: str) -> PlanError:
    return PlanError(f"--{kind} {text}: {why}; give for example --{kind} {EXAMPLES[kind]}")


def parse_seconds(text: str, where: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text)
    if found is None:
        raise PlanError(
            f"{where}: {text!r} is no time; needed: a number with ms, s or m, such as 500ms or 20s"
            + (", or random" if "@" in where else "")
        )
    return float(found[1]) * UNITS[found[2]]


def parse_share(text: float | None) -> float:
    share = 0.0 if text is None else text
    if not 0 <= share <= 1 or math.isnan(share):
        raise PlanError(f"--duplicate {share:g}: a share of frames is needed, 0 to 1, such as 0.05")
    return share


def check_faults(faults: Sequence[Fault], frames: bool, plan: Plan) -> None:
    """Refuse faults that this plan has no target for. `frames`: some are delayed or duplicated."""
    if not faults and not frames:
        raise PlanError(
            "nothing to break; give --kill, --pause, --cut, --delay, --duplicate or --full-disk, "
            "such as --kill server@2s"
        )
    if plan.servers == 0:
        what = str(faults[0]) if faults else "delayed and duplicated frames"
        raise PlanError(
            f"{what}: the plan has no servers; faults are for runs with parameter servers: add "
            "servers=3 replicas=2"
        )
    if plan.until is not None:
        raise PlanError(
            f"until={plan.until}: a disturbed run may reach it elsewhere, and then nobody can say "
            "which samples are missing; give epochs= or steps="
        )
    ranks = plan.layout.size
    for fault in faults:
        if fault.target == "server" and (fault.index or 0) >= plan.servers:
            raise PlanError(
                f"{fault}: there are {plan.servers} servers, 0 to {plan.servers - 1}; add servers, "
                "or name one of these"
            )
        if fault.target == "worker" and (fault.index or 0) >= ranks:
            raise PlanError(f"{fault}: there are {ranks} workers, 0 to {ranks - 1}")
        if fault.kind == "kill" and fault.target == "worker" and plan.elastic is None:
            raise PlanError(
                f"{fault}: a killed worker ends this run, since its plan has no elastic=; add "
                "elastic=1:4, or kill a server or the coordinator"
            )


def risks(faults: Sequence[Fault], plan: Plan) -> list[str]:
    """Faults that will lose something, as sentences."""
    if plan.replicas > 1:
        return []
    return [
        f"{fault}: with replicas=1 no other server has what this one holds"
        for fault in faults
        if fault.kind in ("kill", "cut") and fault.target in ("server", "coordinator")
    ]


def draw_times(faults: Sequence[Fault], duration_s: float, seed: int) -> list[TimedFault]:
    """Faults by time; random ones in the middle of a run that takes so long undisturbed."""
    drawn, first, last = random.Random(seed), *(share * duration_s for share in MIDDLE)
    timed = []
    for fault in faults:
        at_s = drawn.uniform(first, last) if fault.at_s is None else fault.at_s
        timed.append(TimedFault(fault, at_s))
    return sorted(timed, key=lambda t: t.at_s)
