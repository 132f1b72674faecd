"""Faults of a run, as the command line names them: KIND[:INDEX]@TIME[/DURATION[*FACTOR]].

--kill server@20s           any server, 20 s after training began
--kill worker@random        at a time drawn from the seed, in the middle of the run
--kill launcher@8s          whoever started the ranks; the run is resumed then
--pause server:1@5s/3s      the second live server, for 3 s
--slow worker:1@5s/10s*4    rank 1 takes four times as long, for 10 s
--cut server:0@8s           all of its connections at once; the process lives
--cut host:1@8s             the first host of a lab, for good
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

Kind = Literal["kill", "pause", "slow", "cut", "full-disk"]
TARGETS: dict[str, tuple[str, ...]] = {
    "kill": ("server", "worker", "coordinator", "launcher"),
    "pause": ("server", "worker", "coordinator"),
    "slow": ("worker",),
    "cut": ("server", "host"),
}
SINGLE = ("coordinator", "launcher")  # of which there is one
LASTING = ("pause", "slow", "full-disk")
MOST_SLOW = 100.0
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
MIDDLE = (0.2, 0.8)  # of the undisturbed run: where random times are
EXAMPLES = {
    "kill": "server@20s, worker@random or coordinator@500ms",
    "pause": "server:1@5s/3s",
    "slow": "worker:1@5s/10s*4",
    "cut": "server:0@8s, or host:1@8s in a lab",
    "full-disk": "6s/4s",
}


@dataclass(frozen=True)
class Fault:
    """`index`: of the live servers, a worker's rank, or a lab's host from 1 on; None: any. `at_s`
    counts from the begin of training; None: at random."""

    kind: Kind
    target: str  # "": the disk
    index: int | None
    at_s: float | None
    duration_s: float = 0.0
    factor: float = 1.0  # of the time that a slow rank takes

    def __str__(self) -> str:
        which = self.target if self.index is None else f"{self.target}:{self.index}"
        when = "random" if self.at_s is None else f"{self.at_s:g}s"
        lasts = f"/{self.duration_s:g}s" if self.duration_s else ""
        times = f"*{self.factor:g}" if self.kind == "slow" else ""
        return f"{self.kind} {which}{'@' if which else ''}{when}{lasts}{times}"


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
    factor = 1.0
    if kind == "slow":
        lasts, _, times = lasts.partition("*")
        factor = _factor(kind, text, times)
    at_s = None if when == "random" else parse_seconds(when, f"--{kind} {text}")
    duration_s = parse_seconds(lasts, f"--{kind} {text}") if slash else 0.0
    if slash and duration_s == 0:
        raise _bad(kind, text, "a duration of 0 breaks nothing")
    return Fault(kind, target, index, at_s, duration_s, factor)


def _factor(kind: Kind, text: str, times: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", times) or not 1 < float(times) <= MOST_SLOW:
        raise _bad(kind, text, f"how many times slower? more than 1, at most {MOST_SLOW:g}")
    return float(times)


def _target(kind: Kind, text: str) -> tuple[str, int | None, str]:
    which, at, rest = text.partition("@")
    target, colon, index = which.partition(":")
    if target not in TARGETS[kind]:
        known = ", ".join(TARGETS[kind])
        raise _bad(kind, text, f"{target or 'nothing'} cannot be its target; known: {known}")
    if colon and (target in SINGLE or not re.fullmatch(r"\d+", index)):
        what = f"there is one {target}" if target in SINGLE else "its number is no number"
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


def check_faults(faults: Sequence[Fault], frames: bool, plan: Plan, hosts: int = 0) -> None:
    """Refuse faults that this plan has no target for. `frames`: some are delayed or duplicated.
    `hosts`: of the lab; 0: in none."""
    if not faults and not frames:
        raise PlanError(
            "nothing to break; give --kill, --pause, --slow, --cut, --delay, --duplicate or "
            "--full-disk, such as --kill server@2s, or --kill worker@2s with elastic=1:4"
        )
    if plan.servers == 0:
        served = [f for f in faults if f.target in ("server", "coordinator")]
        if frames or served:
            what = str(served[0]) if served else "delayed and duplicated frames"
            raise PlanError(
                f"{what}: the plan has no servers; add servers=3 replicas=2, or break ranks: "
                "--kill worker@2s with elastic=1:4"
            )
    if plan.until is not None:
        raise PlanError(
            f"until={plan.until}: a disturbed run may reach it elsewhere, and then nobody can say "
            "which samples are missing; give epochs= or steps="
        )
    for fault in faults:
        _check_target(fault, plan, hosts)


def _check_target(fault: Fault, plan: Plan, hosts: int) -> None:
    ranks, index = plan.layout.size, fault.index or 0
    if fault.target == "server" and index >= plan.servers:
        raise PlanError(
            f"{fault}: there are {plan.servers} servers, 0 to {plan.servers - 1}; add servers, "
            "or name one of these"
        )
    if fault.target == "worker" and index >= ranks:
        raise PlanError(f"{fault}: there are {ranks} workers, 0 to {ranks - 1}")
    if fault.kind == "kill" and fault.target == "worker" and plan.elastic is None:
        raise PlanError(
            f"{fault}: a killed worker ends this run, since its plan has no elastic=; add "
            "elastic=1:4, or kill a server or the coordinator"
        )
    if fault.target == "launcher" and plan.servers:
        raise PlanError(
            f"{fault}: servers end with the launcher, and what was pushed since the last "
            "checkpoint with them; kill servers, or leave servers= out"
        )
    if fault.target == "launcher" and plan.save == "off":
        raise PlanError(
            f"{fault}: the run is resumed then, but save=off saves nothing; leave save= out"
        )
    if fault.target == "host":
        _check_host(fault, plan, hosts)


def _check_host(fault: Fault, plan: Plan, hosts: int) -> None:
    if hosts < 2:
        raise PlanError(
            f"{fault}: hosts are those of a lab, and two or more are needed; start with manyhands "
            "lab --hosts 2 -- chaos ..."
        )
    if fault.index is not None and not 1 <= fault.index <= hosts:
        raise PlanError(f"{fault}: the lab's hosts are host:1 to host:{hosts}")
    if plan.elastic is None or plan.servers:
        raise PlanError(
            f"{fault}: its ranks are lost, which a run survives with elastic= and without servers; "
            "add elastic=1:4, and leave servers= out"
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
