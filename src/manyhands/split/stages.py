"""Stage cuts: where a chain of nodes is cut into the stages of a pipeline.

    best[s][j] = min over i of max(best[s-1][i], cost of nodes i..j)

Dynamic programming over (stages used, nodes used) minimizes the cost of the costliest stage, within
a memory limit. Of the cuts whose costliest stage is within `slack` of the best, the one with the
fewest bytes over its cuts is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manyhands.errors import PlanError

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def balance_stages(
    costs: Sequence[float],
    stages: int,
    *,
    memory: Sequence[float] | None = None,
    activations: Sequence[float] | None = None,
    in_flight: Sequence[int] | None = None,
    limit: float | None = None,
    trainable: Sequence[bool] | None = None,
    crossing: Sequence[float] | None = None,
    slack: float = 0.05,
) -> list[int]:
    """The nodes at which stages begin, after the first: `stages - 1` positions.

    costs        time of each node
    memory       bytes of each node, once
    activations  bytes of each node per micro-batch in flight
    in_flight    micro-batches in flight, by stage
    limit        bytes of a stage at the most
    trainable    each stage needs one of these nodes
    crossing     bytes that are sent over a cut before node i; inf: no cut may be there
    """
    n = len(costs)
    chain = _Chain(
        stages,
        time=_prefix(costs),
        once=_prefix(memory or [0.0] * n),
        each=_prefix(activations or [0.0] * n),
        trainable=np.concatenate(
            [[0], np.cumsum(np.ones(n, bool) if trainable is None else np.asarray(trainable, bool))]
        ),
        crossing=np.asarray([0.0, *(crossing or [0.0] * n)[1:], 0.0]),
        in_flight=list(in_flight or [1] * stages),
    )
    best, cut = chain.solve(np.inf, limit)
    if best[stages] == np.inf:
        raise chain.refused(limit)
    if crossing is None:
        return cut
    return chain.solve(best[stages] * (1 + slack) * (1 + 1e-12), limit)[1]


class _Chain:
    """Sums over the first nodes of a chain, and the dynamic programming on them."""

    def __init__(
        self,
        stages: int,
        time: Floats,
        once: Floats,
        each: Floats,
        trainable: np.ndarray[tuple[int], np.dtype[np.int64]],
        crossing: Floats,
        in_flight: Sequence[int],
    ):
        self.stages, self.n = stages, len(time) - 1
        self.time, self.once, self.each = time, once, each
        self.trainable, self.crossing, self.in_flight = trainable, crossing, in_flight

    def fits(
        self, s: int, j: int, limit: float | None
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For every i: may stage s be nodes i..j?"""
        enough = self.trainable[j] > self.trainable[: j + 1]
        enough &= np.isfinite(self.crossing[: j + 1])
        if limit is not None:
            once = self.once[j] - self.once[: j + 1]
            each = self.each[j] - self.each[: j + 1]
            enough &= once + self.in_flight[s] * each <= limit
        return np.asarray(enough)

    def solve(self, within: float, limit: float | None) -> tuple[Floats, list[int]]:
        """The best value by number of stages, and the cuts.

        Minimizes the costliest stage; where `within` bounds that, the bytes that cross the cuts."""
        best = np.full((self.stages + 1, self.n + 1), np.inf)
        came = np.zeros((self.stages + 1, self.n + 1), dtype=np.int64)
        best[0][0] = 0.0
        for s in range(1, self.stages + 1):
            for j in range(s, self.n + 1):
                cost = self.time[j] - self.time[: j + 1]
                before = best[s - 1][: j + 1]
                if within == np.inf:
                    value = np.maximum(before, cost)
                else:
                    value = np.where(cost <= within, before + self.crossing[: j + 1], np.inf)
                value = np.where(self.fits(s - 1, j, limit), value, np.inf)
                came[s][j] = value.argmin()
                best[s][j] = value[came[s][j]]
        cut, j = [], self.n
        for s in range(self.stages, 0, -1):
            j = int(came[s][j])
            cut.append(j)
        return best[:, self.n], cut[::-1][1:]

    def refused(self, limit: float | None) -> PlanError:
        """Why no cut was found, and what to do."""
        possible = self.solve(np.inf, None)[0]
        if possible[self.stages] == np.inf:
            most = max((s for s in range(1, self.stages) if possible[s] < np.inf), default=1)
            return PlanError(
                f"{self.stages} stages are wanted, but no more than {most} can be cut out of this "
                f"model; set pipe={most} or less"
            )
        assert limit is not None
        mib = 2**20
        return PlanError(
            f"no cut into {self.stages} stages keeps each within {limit / mib:.1f} MiB: the model "
            f"takes {self.once[-1] / mib:.1f} MiB and {self.each[-1] / mib:.1f} MiB per "
            "micro-batch in flight; use more stages, smaller micro-batches or recompute=true"
        )


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
