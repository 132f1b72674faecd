"""ADMM's residuals, what they do to rho, and when a run has converged."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.core import Group, Tensors
from manyhands.merge.admm import ADMM
from support.quadratic import BATCH, Problem, Rank, run


@dataclass
class Seen:
    """A rank after a round."""

    y: Tensor
    z: Tensor
    rho: float
    primal: float
    dual: float
    norm: float


def rounds_of(strategy: ADMM, problem: Problem, rounds: int, **options: Any) -> list[list[Seen]]:
    """By round, then by rank."""
    seen: list[list[Seen]] = [[] for _ in range(problem.size)]

    def look(me: Rank, link: Group, state: Tensors) -> None:
        y = me.point({k: state[f"y/{k}"] for k in me.replica.params})
        numbers = [float(state[k]) for k in ("rho", "primal", "dual", "norm")]
        seen[me.rank].append(Seen(y.clone(), me.point().clone(), *numbers))

    run(strategy, problem, rounds, after_round=look, **options)
    return [list(at) for at in zip(*seen, strict=True)]


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_the_residuals_are_those_of_the_paper(lam: float) -> None:
    """primal^2 = sum_i |x_i - z|^2, where y_i has changed by rho (x_i - z);
    dual^2 = sum_i |rho (z - z_old)|^2.
    """
    size = 3
    strategy = ADMM(period=4, rho=0.5, lam=lam, ratio=1.5)
    seen = rounds_of(strategy, Problem(size, mixed=1.0), 6)
    for before, after in itertools.pairwise(seen):
        rho, now = before[0].rho, after[0]
        apart = [(b.y - a.y) / rho for a, b in zip(before, after, strict=True)]
        primal = math.sqrt(sum(float(d.square().sum()) for d in apart))
        dual = rho * math.sqrt(size) * float((now.z - before[0].z).norm())
        assert (now.primal, now.dual) == pytest.approx((primal, dual), rel=1e-9)
        assert now.norm == pytest.approx(math.sqrt(size) * float(now.z.norm()), rel=1e-9)
        assert all((s.rho, s.primal, s.dual) == (now.rho, now.primal, now.dual) for s in after)
    assert len({at[0].rho for at in seen}) > 1, "rho has changed, so the residuals are of its old"


def test_a_rank_without_samples_counts_in_neither_residual() -> None:
    size = 3
    one_idle = lambda rank, step: 0 if rank == 1 else BATCH
    strategy = ADMM(period=4, rho=0.5, ratio=math.inf)
    seen = rounds_of(strategy, Problem(size, mixed=1.0), 3, counts=one_idle)
    for before, after in itertools.pairwise(seen):
        assert torch.equal(before[1].y, after[1].y)
        dual = 0.5 * math.sqrt(size - 1) * float((after[0].z - before[0].z).norm())
        assert after[0].dual == pytest.approx(dual, rel=1e-9)


def adapted(strategy: ADMM, primal: float, move: float, ranks: float = 1.0) -> Tensors:
    """The state after a round with these distances |x_i - z| and |z - z_old|; |z| is 1."""
    numbers = {"rho": strategy.rho, "primal": 0.0, "dual": 0.0, "norm": 0.0}
    state = {k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
    squares = torch.tensor([primal**2, move**2, 1.0], dtype=torch.float64)
    strategy._adapt(state, squares, torch.tensor(ranks, dtype=torch.float64))
    return state


@pytest.mark.parametrize(
    ("primal", "move", "rho"),
    [
        (1.0, 1.0, 0.25),  # dual 0.25: within a factor of 10
        (2.4, 1.0, 0.25),
        (2.6, 1.0, 0.5),  # primal > 10 dual
        (0.026, 1.0, 0.25),
        (0.024, 1.0, 0.125),  # dual > 10 primal
    ],
)
def test_rho_doubles_or_halves_where_residuals_are_more_than_the_ratio_apart(
    primal: float, move: float, rho: float
) -> None:
    state = adapted(ADMM(rho=0.25, ratio=10.0, span=4.0), primal, move)
    assert float(state["rho"]) == rho
    assert float(state["dual"]) == 0.25 * move, "of the rho that the round had"


@pytest.mark.parametrize(
    ("primal", "move", "converged"),
    [(0.009, 0.009, True), (0.011, 0.009, False), (0.009, 0.011, False)],
)
@pytest.mark.parametrize("rho", [0.25, 4.0])
def test_a_run_has_converged_once_both_distances_are_below_the_tolerance(
    primal: float, move: float, converged: bool, rho: float
) -> None:
    strategy = ADMM(rho=rho, tolerance=0.01, span=1.0)
    assert strategy._converged(adapted(strategy, primal, move)) == converged
