"""Plan of a fit: where it runs, and which words it honours; the others are refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from manyhands.core import Plan, ProcessInfo
from manyhands.errors import PlanError
from manyhands.exchange.compression import SERVER_CODECS
from manyhands.launch import environment
from manyhands.linear.catalogue import SOLVERS
from manyhands.linear.spec import FitSpec
from manyhands.plan import words as plan_words

# words that a linear model honours; every other one is refused
OF_RANKS = ("link", "stall_s")  # need more than one rank
OF_RUNS = ("grace_s", "preempt_file")  # need a run: ranks, or a directory
OF_DIRECTORIES = ("save", "keep", "restarts", "restart_window_s")
OF_SERVERS = (
    "servers", "shards", "server_memory", "replicas", "ack", "membership", "lease_s", "compress",
)  # fmt: skip
KNOWN = {
    "data", "tensor", "threads", "split", "device", "timeout_s", *OF_RANKS, *OF_RUNS,
    *OF_DIRECTORIES, *OF_SERVERS,
}  # fmt: skip
INSTEAD = {
    "seed": "give the estimator random_state",
    "steps": "give the estimator max_iter",
    "epochs": "give the estimator max_iter",
    "until": "give the estimator tol",
    "merge": "choose the estimator's solver",
}


@dataclass(frozen=True)
class Where:
    """Where a fit runs and what it writes."""

    plan: str = ""
    directory: str | None = None
    resume: bool = False
    quiet: bool = True


def parsed(words: str) -> Plan:
    """The plan; refuses words that have no effect on a linear model. One without words is for this
    process alone, whoever has started it."""
    here = environment.process_info()
    if not words.strip():
        return plan_words.parse("")
    given = plan_words.overlay(words, environment.words())
    for word in sorted({key.partition(".")[0] for key in given} - KNOWN):
        do = INSTEAD.get(word, f"{', '.join(sorted(KNOWN))} have one")
        raise PlanError(f"{word}={given.get(word)} has no effect on a linear model; {do}")
    _check_split(given)
    plan = plan_words.parse(given, size=None if here.started_by == "alone" else here.size)
    if plan.device == "cuda":
        raise PlanError("device=cuda: linear models are computed on CPUs; leave it out")
    return replace(plan, device="cpu")


def _check_split(given: dict[str, Any]) -> None:
    """Rows over data= ranks, or columns over tensor= ranks."""
    split = given.get("split", "auto")
    # what is no number is refused when the plan is parsed
    sizes = [str(given.get(axis, 1)) for axis in ("tensor", "data")]
    columns, data = (int(size) if size.isdigit() else 1 for size in sizes)
    if split not in ("auto", "by_feature"):
        raise PlanError(
            f"split={split}: rows are split over data= ranks as they are stored; "
            "leave it out, or split columns with tensor=K split=by_feature"
        )
    if columns > 1 and split != "by_feature":
        raise PlanError(
            f"tensor={columns} splits columns over ranks; say so with split=by_feature, or split "
            f"rows with data={columns}"
        )
    if split == "by_feature" and data > 1:
        raise PlanError(
            f"split=by_feature with data={data}: columns are split over tensor= ranks, and each "
            f"has all rows; give tensor={data * columns} alone"
        )


def by_feature(plan: Plan) -> bool:
    return plan.split == "by_feature"


def needs_columns(spec: FitSpec) -> bool:
    return isinstance(spec.solver, SOLVERS["scd"].make)


def check_servers(spec: FitSpec, plan: Plan) -> None:
    """Tables on servers are for one solver, which on several ranks needs them."""
    served, name = isinstance(spec.solver, SOLVERS["ftrl"].make), type(spec.solver).__name__
    if plan.servers and not served:
        raise PlanError(
            f"servers={plan.servers} has no effect: {name} keeps nothing on servers; leave it out, "
            "or choose solver='ftrl'"
        )
    if served and plan.layout.size > 1 and not plan.servers:
        raise PlanError(
            f"solver ftrl on {plan.layout.size} ranks keeps its columns on servers, and the plan "
            "has none; add servers=1"
        )
    if plan.compress != "none" and not plan.servers:
        raise PlanError(
            f"compress={plan.compress} is about what goes to servers, and the plan has none; leave "
            "it out, or choose solver='ftrl' and servers=1"
        )
    if plan.compress not in ("none", *SERVER_CODECS):
        raise PlanError(
            f"compress={plan.compress} is for gradients between ranks; over servers "
            f"{', '.join(SERVER_CODECS)} are possible"
        )
    if by_feature(plan) and spec.classes > 2:
        raise PlanError(
            f"split=by_feature with {spec.classes} classes: columns are split for two classes; "
            f"split rows with data={plan.layout.size}, or wrap in OneVsRestClassifier"
        )


def check_words(given: dict[str, Any], where: Where, plan: Plan, here: ProcessInfo) -> None:
    """Refuse words that have no effect on this fit. Those of a run that goes on are not `given`:
    it may have had other ranks."""
    if where.directory is not None and here.started_by != "alone" and not where.plan.strip():
        raise PlanError(
            f"directory={where.directory} in one of {here.size} processes of {here.started_by}, "
            f"each of which fits for itself; let them fit together with plan='data={here.size}', "
            "or leave the directory out"
        )
    ranks = plan.layout.size
    if where.resume and where.directory is None:
        raise PlanError("resume=True without a directory; give that of the run to go on with")
    runs = ranks > 1 or plan.servers > 0
    needed = [
        (OF_RANKS, ranks > 1, "is about several ranks; add data=2, say"),
        (("timeout_s",), runs, "is about several processes; add data=2, say"),
        (OF_RUNS, runs or where.directory is not None, "is about a run; give directory="),
        (OF_DIRECTORIES, where.directory is not None, "is about checkpoints; give directory="),
    ]
    for words, fits, why in needed:
        for word in words:
            if word in given and not fits:
                raise PlanError(f"{word}={given[word]} has no effect on this fit: it {why}")
