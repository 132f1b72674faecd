"""Limited-memory BFGS: curvature pairs, the two-loop recursion and a strong Wolfe line search.

    s_k = x_{k+1} - x_k,   y_k = g_{k+1} - g_k,   rho_k = 1 / (s_k . y_k)
    H_{k+1} = (I - rho_k s_k y_k') H_k (I - rho_k y_k s_k') + rho_k s_k s_k'       (BFGS)
    H_0 = gamma I,   gamma = s_k . y_k / y_k . y_k  of the newest pair

`two_loop` applies H, built from the last m pairs, to a vector in 4 m n multiplications, without
forming H. `strong_wolfe` looks along a direction d, with phi(a) = f(x + a d), for a step a with

    phi(a) <= phi(0) + c1 a phi'(0)    and    |phi'(a)| <= c2 |phi'(0)|

The second condition makes s . y positive, and so keeps H positive definite. Functions of flat
vectors only: who evaluates f, and on which data, is the caller's business. Where ranks hold slices
of all vectors, only the dot products travel (Dean et al. 2012, "Sandblaster").

Papers: Liu & Nocedal 1989 (doi:10.1007/BF01589116); the search is algorithms 3.5 and 3.6 of
Nocedal & Wright, Numerical Optimization, 2006; the approximate condition for losses with rounding
noise is of Hager & Zhang 2005 (doi:10.1137/030601880).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CURVATURE = 1e-10  # a pair counts if s . y > CURVATURE |s| |y|

Dot = Callable[[Tensor, Tensor], float]


def dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b))


class CurvaturePair(NamedTuple):
    s: Tensor
    y: Tensor
    sy: float
    yy: float


class History:
    """The last `size` curvature pairs, oldest first. `dot`: where ranks hold slices of the vectors,
    the product of the whole ones."""

    def __init__(self, size: int = 10, dot: Dot = dot) -> None:
        self.size, self._dot = size, dot
        self._pairs: deque[CurvaturePair] = deque(maxlen=size)

    def add(self, s: Tensor, y: Tensor) -> bool:
        """Keep the pair, which must not change afterwards, if its curvature s . y is positive
        beyond rounding; False: skipped, and the history is as before."""
        sy, ss, yy = self._dot(s, y), self._dot(s, s), self._dot(y, y)
        if not (math.isfinite(sy) and sy > CURVATURE * math.sqrt(ss) * math.sqrt(yy)):
            return False
        self.restore(CurvaturePair(s, y, sy, yy))
        return True

    def restore(self, pair: CurvaturePair) -> None:
        """Keep a pair of an earlier history."""
        self._pairs.append(pair)

    def clear(self) -> None:
        self._pairs.clear()

    def __iter__(self) -> Iterator[CurvaturePair]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


def two_loop(g: Tensor, pairs: History, gamma: float | None = None, dot: Dot = dot) -> Tensor:
    """The quasi-Newton direction -H g. `gamma` fixes H_0 = gamma I; None: s . y / y . y of the
    newest pair, and 1 without pairs. `dot` as in `History`."""
    d = g.neg()
    kept = list(pairs)
    alphas: list[float] = []
    for s, y, sy, _ in reversed(kept):
        alpha = dot(s, d) / sy
        d.sub_(y, alpha=alpha)
        alphas.append(alpha)
    if gamma is None:
        gamma = kept[-1].sy / kept[-1].yy if kept else 1.0
    d.mul_(gamma)
    for (s, y, sy, _), alpha in zip(kept, reversed(alphas), strict=True):
        d.add_(s, alpha=alpha - dot(y, d) / sy)
    return d


class LinePoint(NamedTuple):
    """A point on the line: the step a, phi(a) and phi'(a)."""

    step: float
    loss: float
    slope: float


class LineSearch(NamedTuple):
    """What a search found. `evaluate` was last called at `step`, unless that is 0. `satisfied`:
    both Wolfe conditions hold; else the step has the lowest loss that was met, 0 if none was lower
    than the start's."""

    step: float
    loss: float
    slope: float
    evaluations: int
    satisfied: bool


def strong_wolfe(
    evaluate: Callable[[float], tuple[float, float]],
    f0: float,
    slope0: float,
    step: float = 1.0,
    c1: float = 1e-4,
    c2: float = 0.9,
    max_evaluations: int = 25,
    noise: float = 0.0,
) -> LineSearch:
    """Search along a descent direction (slope0 < 0): `evaluate(a)` gives phi(a) and phi'(a).

    `noise` is the relative rounding error of a loss. Within it of the start's loss, losses cannot
    be compared, and phi'(a) <= (2 c1 - 1) phi'(0) stands for sufficient decrease: the same
    condition for a quadratic, of slopes only. A step at which the loss is not finite is too long.
    """
    if not slope0 < 0:
        raise ValueError(f"slope0={slope0}, but a direction of descent, a slope below 0, is needed")
    return _Search(evaluate, LinePoint(0.0, f0, slope0), c1, c2, max_evaluations, noise).run(step)


class _Search:
    """Bracketing, then zoom: `lo` always has the lowest loss of the bracket that decreases enough,
    and the minimum lies between `lo` and `hi`."""

    def __init__(
        self,
        evaluate: Callable[[float], tuple[float, float]],
        start: LinePoint,
        c1: float,
        c2: float,
        max_evaluations: int,
        noise: float,
    ) -> None:
        self._evaluate, self._start, self._c1, self._c2 = evaluate, start, c1, c2
        self._left = self._most = max_evaluations
        self._noise = noise * abs(start.loss)
        self._last = start

    def run(self, step: float) -> LineSearch:
        before = self._start
        while self._left:
            point = self._at(step)
            if not self._decreased(point) or self._higher(point, before):
                return self._zoom(before, point)
            if self._flat(point):
                return self._found(point, True)
            if point.slope >= 0:
                return self._zoom(point, before)
            longer = _cubic_minimiser(before, point)
            lowest, highest = step + 1.1 * (step - before.step), 10 * step
            before, step = point, min(max(longer, lowest), highest)
        return self._found(before, False)

    def _zoom(self, lo: LinePoint, hi: LinePoint) -> LineSearch:
        width = abs(hi.step - lo.step)
        slow = False
        while self._left and abs(hi.step - lo.step) > 1e-12 * max(lo.step, hi.step):
            step = (lo.step + hi.step) / 2 if slow else _inside(lo, hi)
            point = self._at(step)
            if not self._decreased(point) or self._higher(point, lo):
                hi = point
            else:
                if self._flat(point):
                    return self._found(point, True)
                if point.slope * (hi.step - lo.step) >= 0:
                    hi = lo
                lo = point
            slow = abs(hi.step - lo.step) > 0.66 * width  # then halve it, so that it must shrink
            width = abs(hi.step - lo.step)
        return self._found(lo, False)

    def _at(self, step: float) -> LinePoint:
        self._left -= 1
        self._last = LinePoint(step, *self._evaluate(step))
        return self._last

    def _decreased(self, point: LinePoint) -> bool:
        start = self._start
        if not (math.isfinite(point.loss) and math.isfinite(point.slope)):
            return False
        if point.loss <= start.loss + self._c1 * point.step * start.slope:
            return True
        near = self._noise > 0 and abs(point.loss - start.loss) <= self._noise
        return near and point.slope <= (2 * self._c1 - 1) * start.slope

    def _higher(self, point: LinePoint, than: LinePoint) -> bool:
        return than.step > 0 and point.loss > than.loss + self._noise

    def _flat(self, point: LinePoint) -> bool:
        return abs(point.slope) <= -self._c2 * self._start.slope

    def _found(self, point: LinePoint, satisfied: bool) -> LineSearch:
        if not satisfied and not point.loss < self._start.loss:
            point = self._start
        if point is not self._last and point.step > 0:
            self._evaluate(point.step)  # the caller's gradient is that of the step it takes
            self._left -= 1
        return LineSearch(*point, self._most - self._left, satisfied)


def _inside(lo: LinePoint, hi: LinePoint) -> float:
    """A trial step between both, a tenth of the bracket away from either end."""
    margin = 0.1 * (hi.step - lo.step)
    ends = sorted((lo.step + margin, hi.step - margin))
    return min(max(_cubic_minimiser(lo, hi), ends[0]), ends[1])


def _cubic_minimiser(p: LinePoint, q: LinePoint) -> float:
    """The minimum of the cubic through both losses and slopes (Nocedal & Wright, eq. 3.59); the
    middle, or double the step beyond, where the cubic has none."""
    if math.isfinite(q.loss) and math.isfinite(q.slope):
        d1 = p.slope + q.slope - 3 * (p.loss - q.loss) / (p.step - q.step)
        square = d1 * d1 - p.slope * q.slope
        if square >= 0:
            d2 = math.copysign(math.sqrt(square), q.step - p.step)
            denominator = q.slope - p.slope + 2 * d2
            if denominator != 0:
                return q.step - (q.step - p.step) * (q.slope + d2 - d1) / denominator
        if p.slope * q.slope > 0 and abs(q.slope) < abs(p.slope):
            return q.step + (q.step - p.step)
    return (p.step + q.step) / 2
