"""Delay compensation (DC-ASGD, arXiv:1609.08326): corrects a gradient for updates since its pull.

    g <- g + lambda g g (w - w_seen)             the diagonal of the Fisher matrix for the Hessian
    adaptive:  m <- decay m + (1 - decay) g g;   lambda <- lambda / sqrt(m + eps)

Elementwise, in place. With lambda = 0, or where nothing has changed since, g keeps its bits.
"""

from __future__ import annotations

from collections.abc import Mapping

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


class DelayCompensation:
    """What delay compensation keeps for one shard: the values that workers saw, and mean squares.

    Not thread-safe: the caller holds the shard's lock.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str], np.ndarray] = {}  # (worker, table)
        self._mean_square: dict[str, np.ndarray] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        return key in self.seen

    def __len__(self) -> int:
        return len(self.seen)

    def remember(self, worker: int, name: str, values: np.ndarray) -> None:
        """Keep a copy of what a worker pulls."""
        kept = self.seen.get((worker, name))
        if kept is None:
            self.seen[worker, name] = values.copy()
        else:
            kept[:] = values

    def apply(
        self,
        worker: int,
        name: str,
        g: np.ndarray,
        w: np.ndarray,
        strength: float,
        decay: float | None,
    ) -> None:
        """Compensate the gradient `g` of a table whose values are `w`, in place."""
        seen, mean_square = self.seen.get((worker, name), w), None
        if decay is not None:
            mean_square = self._mean_square.setdefault(name, np.zeros_like(w))
        compensate(g, w, seen, strength, mean_square, decay or 0.0)

    def take_state(self, name: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Take the mean square of a table out of its state; returns the rest, the optimizer's."""
        self._mean_square.pop(name, None)
        if MEAN_SQUARE in state:
            self._mean_square[name] = state[MEAN_SQUARE].copy()
        return {key: value for key, value in state.items() if key != MEAN_SQUARE}

    def forget(self, name: str) -> None:
        """Drop all that is kept for a table."""
        self._mean_square.pop(name, None)
        for key in [key for key in self.seen if key[1] == name]:
            del self.seen[key]

    def state(self, name: str) -> dict[str, np.ndarray]:
        """A copy of what belongs to a table's state."""
        kept = self._mean_square.get(name)
        return {} if kept is None else {MEAN_SQUARE: kept.copy()}
