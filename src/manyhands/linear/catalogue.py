"""Catalogue of solvers: what each can minimise, and which one `solver="auto"` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manyhands.linear.losses import (
    HINGE,
    LOGISTIC,
    NAMES,
    SMOOTHNESS,
    SQUARED,
    SQUARED_HINGE,
)
from manyhands.linear.solvers.admm import LinearADMM
from manyhands.linear.solvers.bfgs import BFGS
from manyhands.linear.solvers.cyclades import Cyclades
from manyhands.linear.solvers.dfp import DFP
from manyhands.linear.solvers.ftrl import FTRL
from manyhands.linear.solvers.hogwild import LinearHogwild
from manyhands.linear.solvers.lbfgs import LinearLBFGS
from manyhands.linear.solvers.newton import Newton
from manyhands.linear.solvers.newton_cg import NewtonCG
from manyhands.linear.solvers.olbfgs import OLBFGS
from manyhands.linear.solvers.saga import SAGA
from manyhands.linear.solvers.scd import SCD
from manyhands.linear.solvers.sdca import SDCA
from manyhands.linear.solvers.sqn import SQN

DUAL = (LOGISTIC, SQUARED, HINGE, SQUARED_HINGE)
TWICE = (LOGISTIC, SQUARED, SQUARED_HINGE)  # losses with a useful second derivative
SMOOTH = tuple(SMOOTHNESS)  # losses whose slope does not jump
ANY = tuple(NAMES.values())


@dataclass(frozen=True)
class Abilities:
    """What a solver can minimise."""

    make: type[Any]
    losses: tuple[int, ...] = TWICE
    l1: bool = False
    needs_l2: bool = False
    ranks: bool = True  # rows split over ranks
    by_feature: bool = False  # columns split over ranks
    softmax: bool = False
    positive: bool = False
    shards: bool = True  # rows that are read block by block


SOLVERS = {
    "sdca": Abilities(SDCA, DUAL, l1=True, needs_l2=True),
    "scd": Abilities(SCD, l1=True, ranks=False, by_feature=True, positive=True, shards=False),
    "newton": Abilities(Newton),
    "newton_cg": Abilities(NewtonCG),
    "admm": Abilities(LinearADMM, l1=True),
    "lbfgs": Abilities(LinearLBFGS, SMOOTH, by_feature=True, softmax=True),
    "bfgs": Abilities(BFGS, SMOOTH, softmax=True),
    "dfp": Abilities(DFP, SMOOTH, softmax=True),
    "olbfgs": Abilities(OLBFGS, SMOOTH),
    "sqn": Abilities(SQN),
    "ftrl": Abilities(FTRL, tuple(NAMES.values()), l1=True),
    "saga": Abilities(SAGA, SMOOTH, l1=True, ranks=False, positive=True),
    "hogwild": Abilities(LinearHogwild, ANY, l1=True, positive=True),
    "cyclades": Abilities(Cyclades, ANY, l1=True, positive=True),
}
NARROW = 1500  # columns up to which a whole Hessian is cheap


@dataclass(frozen=True)
class Shape:
    """What a solver is chosen by."""

    rows: float
    columns: int
    nonzeros: float
    ranks: int = 1
    by_feature: bool = False
    in_memory: bool = True


def choose(
    shape: Shape, loss: int, l1: float, l2: float, classes: int, positive: bool
) -> tuple[str, str]:
    """The solver that `solver="auto"` takes, and why."""
    per_row = shape.nonzeros / max(shape.rows, 1)
    if positive:
        return "scd", "w >= 0: coordinate descent projects each coordinate"
    if classes > 2:
        return "lbfgs", f"{classes} classes: one softmax over all of them"
    if shape.by_feature:
        return ("scd" if l1 else "lbfgs"), "columns are split over ranks: only margins travel"
    if l1 and loss in TWICE and shape.in_memory and shape.ranks == 1:
        return "scd", "l1: coordinate descent visits only columns that can be non-zero"
    if l1 and l2 and loss in DUAL:
        return "sdca", "l1 and l2 over rows of several ranks or shards: the dual has a gap"
    if l1:
        why = "l1 over rows of several ranks or shards: its prox joins local fits"
        return ("admm" if loss in TWICE else "hogwild"), why
    if loss not in TWICE:
        name = "sdca" if loss in DUAL and l2 else "hogwild"
        return name, "the loss has no second derivative"
    cheap = min(per_row * per_row, shape.columns * per_row) <= 40 * max(per_row, shape.columns / 40)
    if shape.columns <= NARROW and (cheap or shape.columns <= 300):
        return "newton", f"{shape.columns} columns: the whole Hessian is cheap"
    if shape.in_memory:
        return "newton_cg", f"{shape.columns} columns: conjugate gradients need no Hessian"
    if not l2:
        return "lbfgs", "rows on disk, no l2: a pass over them an iteration"
    return "sdca", "rows on disk: dual coordinate ascent gets most out of a pass over them"


def names_where(l2: bool = True, **needed: Any) -> str:
    """The solvers that can do it, for error messages. l2: whether there is an l2 penalty."""
    able = [
        name
        for name, can in SOLVERS.items()
        if (l2 or not can.needs_l2)
        and all(
            (value in can.losses) if key == "loss" else bool(getattr(can, key)) >= bool(value)
            for key, value in needed.items()
        )
    ]
    return ", ".join(repr(name) for name in able)
