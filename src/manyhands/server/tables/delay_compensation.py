"""Delay compensation (DC-ASGD, arXiv:1609.08326): corrects a gradient for updates since its pull.

    g <- g + lambda g g (w - w_seen)             the diagonal of the Fisher matrix for the Hessian
    adaptive:  m <- decay m + (1 - decay) g g;   lambda <- lambda / sqrt(m + eps)

Elementwise, in place. With lambda = 0, or where nothing has changed since, g keeps its bits.
"""

import numpy as np

from manyhands.kernels.compile import compiled

EPS = 1e-7
MEAN_SQUARE = "compensate/mean_square"  # its name among the table's optimizer state


@compiled
def _constant(g, w, seen, strength):
    for i in range(g.size):
        g[i] += strength * g[i] * g[i] * (w[i] - seen[i])


@compiled
def _adaptive(g, w, seen, strength, mean_square, decay, rest, eps):
    for i in range(g.size):
        square = g[i] * g[i]
        mean_square[i] = decay * mean_square[i] + rest * square
        g[i] += strength / np.sqrt(mean_square[i] + eps) * square * (w[i] - seen[i])


def compensate(
    g: np.ndarray,
    w: np.ndarray,
    seen: np.ndarray,
    strength: float,
    mean_square: np.ndarray | None = None,
    decay: float = 0.0,
) -> None:
    """Change `g`, and `mean_square` where there is one, in place."""
    number = g.dtype.type
    if mean_square is None:
        _constant(g, w, seen, number(strength))
    else:
        _adaptive(
            g, w, seen, number(strength), mean_square, number(decay), number(1 - decay), number(EPS)
        )
