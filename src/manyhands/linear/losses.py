"""Losses of linear models: value, slope, curvature and convex conjugate, as compiled functions.

    P(w, b) = sum_i c_i phi(x_i'w + b, y_i) + l1 |w|_1 + l2/2 |w|^2

A kernel is given a loss by its number, and `eps` where the loss has a width. Labels of classifiers
are -1 and +1. `conjugate(a)` is phi*(-a), with a the dual variable of one row at c = 1; it is
infinite outside its domain.
"""

from __future__ import annotations

import math

from manyhands.kernels.compile import inlined

LOGISTIC, SQUARED, HINGE, SQUARED_HINGE = 0, 1, 2, 3
MODIFIED_HUBER, PERCEPTRON, HUBER, INSENSITIVE, SQUARED_INSENSITIVE = 4, 5, 6, 7, 8

NAMES = {
    "log_loss": LOGISTIC,
    "squared_error": SQUARED,
    "hinge": HINGE,
    "squared_hinge": SQUARED_HINGE,
    "modified_huber": MODIFIED_HUBER,
    "perceptron": PERCEPTRON,
    "huber": HUBER,
    "epsilon_insensitive": INSENSITIVE,
    "squared_epsilon_insensitive": SQUARED_INSENSITIVE,
}
# largest second derivative; infinite where the slope jumps
SMOOTHNESS = {LOGISTIC: 0.25, SQUARED: 1.0, SQUARED_HINGE: 2.0, MODIFIED_HUBER: 2.0, HUBER: 1.0}


@inlined
def value(loss, z, y, eps):
    if loss == LOGISTIC:
        m = y * z
        return math.log1p(math.exp(-m)) if m > 0 else math.log1p(math.exp(m)) - m
    if loss == SQUARED:
        return 0.5 * (z - y) * (z - y)
    if loss == HINGE:
        return max(0.0, 1.0 - y * z)
    if loss == SQUARED_HINGE:
        t = max(0.0, 1.0 - y * z)
        return t * t
    if loss == MODIFIED_HUBER:
        m = y * z
        return -4.0 * m if m < -1.0 else max(0.0, 1.0 - m) * max(0.0, 1.0 - m)
    if loss == PERCEPTRON:
        return max(0.0, -y * z)
    r = abs(z - y)
    if loss == HUBER:
        return 0.5 * r * r if r <= eps else eps * r - 0.5 * eps * eps
    over = max(0.0, r - eps)
    return over if loss == INSENSITIVE else over * over


@inlined
def slope(loss, z, y, eps):
    """d phi / d z; where it jumps, one of the subgradients."""
    if loss == LOGISTIC:
        m = y * z
        if m > 0:
            e = math.exp(-m)
            return -y * e / (1.0 + e)
        return -y / (1.0 + math.exp(m))
    if loss == SQUARED:
        return z - y
    if loss == HINGE:
        return -y if y * z < 1.0 else 0.0
    if loss == SQUARED_HINGE:
        return -2.0 * y * max(0.0, 1.0 - y * z)
    if loss == MODIFIED_HUBER:
        m = y * z
        return -4.0 * y if m < -1.0 else -2.0 * y * max(0.0, 1.0 - m)
    if loss == PERCEPTRON:
        return -y if y * z <= 0.0 else 0.0
    r = z - y
    if loss == HUBER:
        return min(max(r, -eps), eps)
    sign = 1.0 if r > 0 else -1.0
    over = max(0.0, abs(r) - eps)
    if loss == INSENSITIVE:
        return sign if over > 0.0 else 0.0
    return 2.0 * sign * over


@inlined
def curvature(loss, z, y, eps):
    """d^2 phi / d z^2; where it jumps, the value on one side."""
    if loss == LOGISTIC:
        e = math.exp(-abs(z))
        return e / ((1.0 + e) * (1.0 + e))
    if loss == SQUARED:
        return 1.0
    if loss == SQUARED_HINGE:
        return 2.0 if y * z < 1.0 else 0.0
    if loss == MODIFIED_HUBER:
        return 2.0 if -1.0 < y * z < 1.0 else 0.0
    if loss == HUBER:
        return 1.0 if abs(z - y) <= eps else 0.0
    if loss == SQUARED_INSENSITIVE:
        return 2.0 if abs(z - y) > eps else 0.0
    return 0.0


@inlined
def derivatives(loss, z, y, eps):
    """Value, slope and curvature; logistic loss needs one exponential for all three."""
    if loss == LOGISTIC:
        m = y * z
        e = math.exp(-abs(m))
        p = 1.0 / (1.0 + e)
        lost = e * p if m > 0 else p
        return math.log1p(e) + max(0.0, -m), -y * lost, e * p * p
    return value(loss, z, y, eps), slope(loss, z, y, eps), curvature(loss, z, y, eps)


@inlined
def conjugate(loss, a, y):
    """phi*(-a) for the losses with a duality gap: logistic, squared, hinge, squared hinge."""
    if loss == SQUARED:
        return 0.5 * a * a - a * y
    p = a * y
    if loss == LOGISTIC:
        p = min(max(p, 0.0), 1.0)
        left = p * math.log(p) if p > 0.0 else 0.0
        right = (1.0 - p) * math.log1p(-p) if p < 1.0 else 0.0
        return left + right
    if loss == HINGE:
        return -p if -1e-12 <= p <= 1.0 + 1e-12 else math.inf
    return 0.25 * p * p - p if p >= -1e-12 else math.inf
