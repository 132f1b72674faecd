"""A chain of layers over the ranks of a pipeline: where it is cut, and who does what when.

    p ranks, m micro-batches, v chunks of the model per rank; times tF (forward), tB (gradient of the input), tW (of the weights)

    schedule       bubble of a rank            kept at the most, rank s (micro-batches whose activations it holds)
    gpipe          (p-1)(tF+tB+tW)             m
    1f1b           (p-1)(tF+tB+tW)             min(m, p-s)
    interleaved    (p-1)(tF+tB+tW)/v           min(v m, (v+1)p - 2s - 1), each 1/v as large; needs m to be a multiple of p
    zero_bubble    (p-1)(tF+max(0, tB-tW))     min(m, p)

Virtual stage k of p v lies on rank k mod p as its chunk k // p. Huang et al. 2019 (gpipe), Narayanan et al. 2019 and 2021 (1f1b,
interleaved), Qi et al. 2023 (zero_bubble: their ZB-H1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Literal, NamedTuple

import numpy as np

from manyhands.errors import PlanError

Kind = Literal["F", "B", "W"]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class StageAction(NamedTuple):
    """What a rank does next: the forward pass of a micro-batch through one of its chunks, or its way back.

    B is the whole backward pass where the schedule has no W (all but zero_bubble); where it has, B computes the gradients of
    what the stage received, which the stage before waits for, and W later those of its weights.
    """

    kind: Kind
    micro: int
    chunk: int = 0


def actions(
    schedule: str, stages: int, rank: int, micros: int, chunks: int = 1
) -> list[StageAction]:
    """All that `rank` of `stages` does in one step, in order. F of virtual stage k needs F of k-1, its B needs B of k+1."""
    check(schedule, stages, micros, chunks)
    if schedule == "gpipe":
        return [StageAction("F", i) for i in range(micros)] + [
            StageAction("B", i) for i in range(micros)
        ]
    if schedule == "1f1b":
        return _one_forward_one_backward(stages, rank, micros)
    if schedule == "interleaved":
        return _interleaved(stages, rank, micros, chunks)
    return _zero_bubble(stages, rank, micros)


def check(schedule: str, stages: int, micros: int, chunks: int = 1) -> None:
    """Raise where the schedule cannot be run so."""
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule={schedule} is unknown; take one of {', '.join(SCHEDULES)}")
    if micros < 1:
        raise PlanError(
            f"micro={micros}, but a step needs one micro-batch at least; set micro=1 or more"
        )
    if schedule != "interleaved" and chunks != 1:
        raise PlanError(
            f"{chunks} chunks per rank have no meaning with schedule={schedule}; use schedule=interleaved"
        )
    if schedule == "interleaved" and micros % stages:
        near = -(-micros // stages) * stages
        raise PlanError(
            f"schedule=interleaved takes micro-batches in rounds of pipe={stages}, and micro={micros} is no multiple of it; "
            f"set micro={near} or use schedule=1f1b"
        )


def _one_forward_one_backward(p: int, rank: int, m: int) -> list[StageAction]:
    ahead = min(m, p - rank - 1)  # so many forward passes until the first micro-batch can be back
    made = [StageAction("F", i) for i in range(ahead)]
    for i in range(m - ahead):
        made += [StageAction("F", ahead + i), StageAction("B", i)]
    return made + [StageAction("B", i) for i in range(m - ahead, m)]


def _interleaved(p: int, rank: int, m: int, v: int) -> list[StageAction]:
    def nth(kind: Kind, i: int) -> StageAction:
        turn, place = divmod(i, p * v)  # p micro-batches go through all chunks, then the next p
        chunk, micro = divmod(place, p)
        return StageAction(kind, turn * p + micro, chunk if kind == "F" else v - 1 - chunk)

    total = m * v
    ahead = min(total, 2 * (p - rank - 1) + (v - 1) * p)
    made = [nth("F", i) for i in range(ahead)]
    for i in range(total - ahead):
        made += [nth("F", ahead + i), nth("B", i)]
    return made + [nth("B", i) for i in range(total - ahead, total)]


def _zero_bubble(p: int, rank: int, m: int) -> list[StageAction]:
    made = []
    for action in _one_forward_one_backward(p, rank, m):
        made.append(action)
        if (
            action.kind == "B" and action.micro >= rank
        ):  # weights wait, so that the ranks before get their gradients sooner
            made.append(StageAction("W", action.micro - rank))
    return made + [StageAction("W", i) for i in range(max(0, m - rank), m)]


class Simulation(NamedTuple):
    """A step as the simulator saw it; exchange takes no time."""

    time: float
    bubble: float  # time in which a rank waits: the most over ranks
    kept: list[
        int
    ]  # by rank: micro-batches (of a chunk each) whose activations it held at the most
    starts: list[list[tuple[float, StageAction]]]  # by rank: when each action began


def simulate(
    schedule: str,
    p: int,
    m: int,
    tF: float = 1.0,
    tB: float = 1.0,
    tW: float = 1.0,
    chunks: int = 1,
) -> Simulation:
    """Run the ranks' lists of actions against each other. Times are those of a rank's whole share of the model."""
    return play(
        [actions(schedule, p, r, m, chunks) for r in range(p)],
        tF / chunks,
        tB / chunks,
        tW / chunks,
    )


def play(lists: Sequence[Sequence[StageAction]], tF: float, tB: float, tW: float) -> Simulation:
    """As `simulate`, for given lists of actions and the times of one chunk."""
    p, v = len(lists), 1 + max((a.chunk for mine in lists for a in mine), default=0)
    splits = any(a.kind == "W" for mine in lists for a in mine)
    seconds: dict[str, float] = {"F": tF, "B": tB if splits else tB + tW, "W": tW}
    over: dict[tuple[Kind, int, int], float] = {}  # (kind, micro, virtual stage) -> when it is over
    now, at, starts = [0.0] * p, [0] * p, [[] for _ in range(p)]  # type: tuple[list[float], list[int], list[list[tuple[float, StageAction]]]]
    held, kept = [0] * p, [0] * p
    moved = True
    while moved:
        moved = False
        for r, mine in enumerate(lists):
            while at[r] < len(mine):
                a = mine[at[r]]
                k = a.chunk * p + r
                need: list[tuple[Kind, int, int]] = []
                if a.kind == "F" and k:
                    need.append(("F", a.micro, k - 1))
                elif a.kind == "B":
                    need.append(("F", a.micro, k))
                    if k < p * v - 1:
                        need.append(("B", a.micro, k + 1))
                elif a.kind == "W":
                    need.append(("B", a.micro, k))
                if not all(n in over for n in need):
                    break
                start = max([now[r], *(over[n] for n in need)])
                now[r] = over[a.kind, a.micro, k] = start + seconds[a.kind]
                starts[r].append((start, a))
                held[r] += (a.kind == "F") - (a.kind == ("W" if splits else "B"))
                kept[r] = max(kept[r], held[r])
                at[r] += 1
                moved = True
    if stuck := [r for r in range(p) if at[r] < len(lists[r])]:
        said = ", ".join(f"rank {r} at {lists[r][at[r]]}" for r in stuck)
        raise PlanError(f"the schedule waits for itself: {said}")
    time = max(now)
    busy = [sum(seconds[a.kind] for a in mine) for mine in lists]
    return Simulation(time, time - min(busy), kept, starts)


def bubble(
    schedule: str,
    p: int,
    m: int,
    tF: float = 1.0,
    tB: float = 1.0,
    tW: float = 1.0,
    chunks: int = 1,
) -> float:
    """How long a rank waits in one step, by the formula at the top; `simulate` finds the same where m >= p."""
    check(schedule, p, m, chunks)
    if schedule == "zero_bubble":
        return (p - 1) * (
            tF + max(0.0, tB - tW)
        )  # the last rank begins after p-1 forward passes, whatever W hides
    return (p - 1) * (tF + tB + tW) / chunks


def share(
    schedule: str,
    p: int,
    m: int,
    tF: float = 1.0,
    tB: float = 1.0,
    tW: float = 1.0,
    chunks: int = 1,
) -> float:
    """The bubble's share of the step's whole time (not of the ideal time): (p-1)/(m+p-1) for gpipe and 1f1b."""
    waits = bubble(schedule, p, m, tF, tB, tW, chunks)
    return waits / (waits + m * (tF + tB + tW))


def most_kept(schedule: str, p: int, rank: int, m: int, chunks: int = 1) -> int:
    """How many micro-batches (of a chunk each) `rank` holds activations of at the most."""
    check(schedule, p, m, chunks)
    if schedule == "gpipe":
        return m
    if schedule == "1f1b":
        return min(m, p - rank)
    if schedule == "interleaved":
        return min(m * chunks, 2 * (p - rank - 1) + (chunks - 1) * p + 1)
    return min(m, p)


def contiguous(
    costs: Sequence[float],
    stages: int,
    *,
    memory: Sequence[float] | None = None,
    kept: Sequence[float] | None = None,
    in_flight: Sequence[int] | None = None,
    limit: float | None = None,
    counts: Sequence[bool] | None = None,
    crossing: Sequence[float] | None = None,
    slack: float = 0.05,
) -> list[int]:
    """Where stages begin, after the first: `stages - 1` positions that make the costliest stage as cheap as can be.

    memory     bytes of each piece, once           kept      bytes of each piece per micro-batch in flight
    in_flight  micro-batches by stage              limit     the bytes that a stage may take
    counts     each stage needs one of these       crossing  what goes over a cut before piece i (inf: none may lie there): of the
                                                             cuts within `slack` of the best, the one with the least is taken

    Dynamic programming over (stages used, pieces used): best[s][j] = min_i max(best[s-1][i], cost of i..j).
    """
    n = len(costs)
    able = np.ones(n, dtype=bool) if counts is None else np.asarray(counts, dtype=bool)
    starts = _prefix(costs)
    some = np.concatenate([[0], np.cumsum(able)])
    once, each = _prefix(memory or [0.0] * n), _prefix(kept or [0.0] * n)
    flying = list(in_flight or [1] * stages)
    over = np.asarray([0.0, *(crossing or [0.0] * n)[1:], 0.0])

    def fits(s: int, j: int, limit: float | None) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For every i: may stage s be pieces i..j?"""
        enough = (some[j] > some[: j + 1]) & np.isfinite(over[: j + 1])
        if limit is not None:
            enough &= (once[j] - once[: j + 1]) + flying[s] * (each[j] - each[: j + 1]) <= limit
        return np.asarray(enough)

    def solve(
        within: float, limit: float | None
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], list[int]]:
        """By the costliest stage; where a bound for that is given, by what crosses."""
        best = np.full((stages + 1, n + 1), np.inf)
        came = np.zeros((stages + 1, n + 1), dtype=np.int64)
        best[0][0] = 0.0
        for s in range(1, stages + 1):
            for j in range(s, n + 1):
                cost = starts[j] - starts[: j + 1]
                if within == np.inf:
                    value = np.maximum(best[s - 1][: j + 1], cost)
                else:
                    value = np.where(cost <= within, best[s - 1][: j + 1] + over[: j + 1], np.inf)
                value = np.where(fits(s - 1, j, limit), value, np.inf)
                came[s][j] = value.argmin()
                best[s][j] = value[came[s][j]]
        cut, j = [], n
        for s in range(stages, 0, -1):
            j = int(came[s][j])
            cut.append(j)
        return best[:, n], cut[::-1][1:]

    best, cut = solve(np.inf, limit)
    if best[stages] == np.inf:
        possible = solve(np.inf, None)[0] if limit is not None else best
        if possible[stages] == np.inf:
            most = max((s for s in range(1, stages) if possible[s] < np.inf), default=1)
            raise PlanError(
                f"{stages} stages are wanted, but no more than {most} can be cut out of this model; set pipe={most} or less"
            )
        assert limit is not None
        raise PlanError(
            f"no cut into {stages} stages keeps each within {limit / 2**20:.1f} MiB: the model takes {once[-1] / 2**20:.1f} MiB and "
            f"{each[-1] / 2**20:.1f} MiB per micro-batch in flight; use more stages, smaller micro-batches or recompute=true"
        )
    if crossing is None:
        return cut
    return solve(best[stages] * (1 + slack) * (1 + 1e-12), limit)[1]


def slowest(costs: Sequence[float], cut: Sequence[int]) -> float:
    """The cost of the costliest stage."""
    edges = [0, *cut, len(costs)]
    return max(sum(costs[a:b]) for a, b in pairwise(edges))


def brute_force(costs: Sequence[float], stages: int) -> float:
    """The cost of the costliest stage in the best of all cuts, by looking at all of them."""
    return min(slowest(costs, cut) for cut in combinations(range(1, len(costs)), stages - 1))


def _prefix(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
