"""Curvature pairs, the two-loop recursion and the strong Wolfe search, on functions of few numbers.

The recursion is compared with the inverse Hessian that BFGS forms; the search with its conditions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyhands.core import Group
from manyhands.exchange.inproc import World
from manyhands.quasi_newton import CURVATURE, CurvaturePair, History, strong_wolfe, two_loop

Phi = Callable[[float], tuple[float, float]]


def vectors(n: int, count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(count)]


def of_quadratic(n: int, count: int, size: int = 10, seed: int = 0) -> tuple[History, Tensor]:
    """Pairs y = A s of a positive definite A, and A."""
    root = torch.stack(vectors(n, n, seed + 1))
    A = root @ root.T + torch.eye(n, dtype=torch.float64)
    history = History(size)
    for s in vectors(n, count, seed):
        assert history.add(s, A @ s)
    return history, A


def implied(history: History, n: int, gamma: float | None = None) -> Tensor:
    """The matrix H that two_loop applies."""
    columns = torch.eye(n, dtype=torch.float64).unbind()
    return torch.stack([-two_loop(e, history, gamma) for e in columns], dim=1)


def bfgs(pairs: list[CurvaturePair], n: int, gamma: float) -> Tensor:
    I = torch.eye(n, dtype=torch.float64)  # noqa: E741
    H = gamma * I
    for s, y, sy, _ in pairs:
        V = I - torch.outer(s, y) / sy
        H = V @ H @ V.T + torch.outer(s, s) / sy
    return H


# -- the history --


def test_without_pairs_the_direction_is_steepest_descent() -> None:
    (g,) = vectors(5, 1)
    assert torch.equal(two_loop(g, History()), -g)
    assert torch.allclose(two_loop(g, History(), gamma=0.5), -0.5 * g)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pairs", [1, 3, 6])
def test_the_implied_matrix_fulfils_the_secant_equation_of_the_newest_pair(
    pairs: int, seed: int
) -> None:
    history, _ = of_quadratic(6, pairs, seed=seed)
    s, y, *_ = list(history)[-1]
    assert torch.allclose(-two_loop(y, history), s, rtol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_the_implied_matrix_is_symmetric_and_positive_definite(seed: int) -> None:
    history, _ = of_quadratic(7, 5, seed=seed)
    H = implied(history, 7)
    assert torch.allclose(H, H.T, rtol=1e-9, atol=1e-11)
    assert torch.linalg.eigvalsh((H + H.T) / 2).min() > 0


@pytest.mark.parametrize("gamma", [1.0, 0.3])
def test_with_room_for_all_pairs_and_fixed_h0_it_is_bfgs(gamma: float) -> None:
    history, _ = of_quadratic(6, 5, size=8)
    assert torch.allclose(implied(history, 6, gamma), bfgs(list(history), 6, gamma), rtol=1e-9)


def test_h0_is_scaled_by_the_newest_pair() -> None:
    history, _ = of_quadratic(6, 4)
    newest = list(history)[-1]
    gamma = float(newest.s @ newest.y) / float(newest.y @ newest.y)
    H = bfgs(list(history), 6, gamma)
    assert torch.allclose(implied(history, 6), H, rtol=1e-9)


def test_a_full_history_drops_the_oldest_pair() -> None:
    history, _ = of_quadratic(6, 5, size=3)
    newer = History(3)
    for s, y, *_ in list(of_quadratic(6, 5, size=5)[0])[2:]:
        newer.add(s, y)
    (g,) = vectors(6, 1, seed=9)
    assert len(history) == 3
    assert torch.equal(two_loop(g, history), two_loop(g, newer))


@pytest.mark.parametrize(
    ("sy", "kept"),
    [(1.0, True), (2 * CURVATURE, True), (CURVATURE / 2, False), (0.0, False), (-1.0, False)],
)
def test_a_pair_is_skipped_unless_its_curvature_is_positive_beyond_rounding(
    sy: float, kept: bool
) -> None:
    s = torch.tensor([1.0, 0.0], dtype=torch.float64)
    y = torch.tensor([sy, math.sqrt(1 - sy * sy)], dtype=torch.float64)  # |s| = |y| = 1
    history = History()
    assert history.add(s, y) is kept
    assert len(history) == kept


def test_a_pair_with_nan_or_infinity_is_skipped() -> None:
    history, s = History(), torch.ones(3)
    for wrong in (math.nan, math.inf):
        assert not history.add(s, torch.tensor([1.0, wrong, 1.0]))
    assert not history.add(torch.zeros(3), s)
    assert len(history) == 0


def test_slices_with_a_summed_product_give_the_slices_of_the_whole_direction() -> None:
    """Two owners of half of each vector; only dot products travel between them."""
    whole, A = of_quadratic(8, 4)
    (g,) = vectors(8, 1, seed=9)

    def main(group: Group) -> Tensor:
        half = slice(4 * group.rank, 4 * group.rank + 4)

        def summed(a: Tensor, b: Tensor) -> float:
            total = torch.dot(a, b).view(1)
            group.all_reduce({"dot": total}).wait()
            return float(total)

        history = History(10, summed)
        for s in vectors(8, 4):
            assert history.add(s[half], (A @ s)[half])
        return two_loop(g[half], history, dot=summed)

    assert torch.allclose(torch.cat(World(2).run(main)), two_loop(g, whole), rtol=1e-12)


# -- the search: functions of Moré and Thuente 1994, and others --


def rational(a: float) -> tuple[float, float]:
    b = 2.0
    return -a / (a * a + b), (a * a - b) / (a * a + b) ** 2


def steep_polynomial(a: float) -> tuple[float, float]:
    b = 0.004
    return (a + b) ** 5 - 2 * (a + b) ** 4, 5 * (a + b) ** 4 - 8 * (a + b) ** 3


def wavy(a: float) -> tuple[float, float]:
    b, l = 0.01, 39  # noqa: E741
    if a <= 1 - b:
        phi, slope = 1 - a, -1.0
    elif a >= 1 + b:
        phi, slope = a - 1, 1.0
    else:
        phi, slope = (a - 1) ** 2 / (2 * b) + b / 2, (a - 1) / b
    phi += 2 * (1 - b) / (l * math.pi) * math.sin(l * math.pi / 2 * a)
    return phi, slope + (1 - b) * math.cos(l * math.pi / 2 * a)


def two_bends(b1: float, b2: float) -> Phi:
    def gamma(b: float) -> float:
        return math.sqrt(1 + b * b) - b

    def phi(a: float) -> tuple[float, float]:
        near, far = math.sqrt((1 - a) ** 2 + b2**2), math.sqrt(a**2 + b1**2)
        value = gamma(b1) * near + gamma(b2) * far
        return value, gamma(b1) * (a - 1) / near + gamma(b2) * a / far

    return phi


def barrier(a: float) -> tuple[float, float]:
    if a >= 1:
        return math.inf, math.nan
    return -3 * a - math.log(1 - a), -3 + 1 / (1 - a)


FUNCTIONS = {
    "rational": rational,
    "steep polynomial": steep_polynomial,
    "wavy": wavy,
    "bends 1e-3": two_bends(0.001, 0.001),
    "bends at the start": two_bends(0.01, 0.001),
    "bends at the end": two_bends(0.001, 0.01),
    "barrier": barrier,
    "quadratic": lambda a: ((a - 3) ** 2, 2 * (a - 3)),
    "exponential": lambda a: (math.exp(-a) + 1e-3 * a, -math.exp(-a) + 1e-3),
}


@pytest.mark.parametrize("first", [1e-3, 1e-1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("c2", [0.9, 0.1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_search_fulfils_both_wolfe_conditions(name: str, c2: float, first: float) -> None:
    phi, c1, last = FUNCTIONS[name], 1e-4, []

    def evaluate(a: float) -> tuple[float, float]:
        last.append(a)
        return phi(a)

    f0, slope0 = phi(0.0)
    assert slope0 < 0
    found = strong_wolfe(evaluate, f0, slope0, first, c1, c2, max_evaluations=60)
    assert found.satisfied and found.step > 0
    loss, slope = phi(found.step)
    assert (found.loss, found.slope) == (loss, slope)
    assert loss <= f0 + c1 * found.step * slope0
    assert abs(slope) <= c2 * abs(slope0)
    assert last[-1] == found.step  # the caller's gradient is that of the step
    assert len(last) == found.evaluations <= 60


def test_a_good_first_step_costs_one_evaluation() -> None:
    found = strong_wolfe(lambda a: ((a - 1) ** 2, 2 * (a - 1)), 1.0, -2.0)
    assert found.satisfied and found.step == 1.0 and found.evaluations == 1


def test_the_search_says_that_nothing_lowers_the_loss() -> None:
    found = strong_wolfe(lambda a: (1.0 + a, -1.0), 1.0, -1.0, max_evaluations=20)
    assert not found.satisfied and found.step == 0.0 and found.loss == 1.0
    assert found.evaluations <= 20


def test_few_evaluations_give_the_lowest_loss_that_was_met() -> None:
    found = strong_wolfe(lambda a: (-a, -1.0), 0.0, -1.0, max_evaluations=3)
    assert not found.satisfied and found.step > 1.0 and found.evaluations == 3


def test_within_the_noise_slopes_decide() -> None:
    """Near a minimum losses differ by less than their rounding."""

    def rounded(a: float) -> tuple[float, float]:
        return 1.0, 1e-9 * (a - 1)  # a loss of 1 + 0.5e-9 (a - 1)^2 in single precision

    assert not strong_wolfe(rounded, 1.0, -1e-9, 0.9).satisfied
    found = strong_wolfe(rounded, 1.0, -1e-9, 0.9, noise=1e-6)
    assert found.satisfied and found.step == 0.9


@pytest.mark.parametrize("slope", [0.0, 1.0, math.nan])
def test_a_direction_that_does_not_descend_is_refused(slope: float) -> None:
    with pytest.raises(ValueError, match=f"slope0={slope}, but a direction of descent"):
        strong_wolfe(rational, 0.0, slope)
