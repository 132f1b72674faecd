"""Pipeline schedules: which micro-batch a rank computes when, and how long it waits.

    p ranks, m micro-batches, v chunks of the model per rank
    times tF (forward), tB (gradient of the input), tW (gradient of the weights)

    schedule       bubble of a rank            micro-batches in flight at the most, on rank s
    gpipe          (p-1)(tF+tB+tW)             m
    1f1b           (p-1)(tF+tB+tW)             min(m, p-s)
    interleaved    (p-1)(tF+tB+tW)/v           min(v m, (v+1)p - 2s - 1), each 1/v as large
    zero_bubble    (p-1)(tF+max(0, tB-tW))     min(m, p)

A micro-batch is in flight on a rank from its forward pass to the end of its backward pass: the
rank keeps its activations. Virtual stage k of p v is chunk k // p of rank k mod p. `interleaved`
needs m to be a multiple of p.

Papers: gpipe: Huang et al. 2019, "GPipe" (arXiv:1811.06965). 1f1b: Narayanan et al. 2019,
"PipeDream" (arXiv:1806.03377). interleaved: Narayanan et al. 2021, "Efficient large-scale language
model training on GPU clusters using Megatron-LM" (arXiv:2104.04473). zero_bubble: Qi et al. 2023,
"Zero bubble pipeline parallelism" (arXiv:2401.10241), its schedule ZB-H1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from manyhands.errors import PlanError

Kind = Literal["F", "B", "W"]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class StageAction(NamedTuple):
    """One action of a rank: the forward (F) or backward pass of a micro-batch through a chunk.

    B is the whole backward pass where the schedule has no W (all but zero_bubble). Where it has, B
    computes the gradients of the stage's inputs, which the stage before waits for, and W later
    those of its weights.
    """

    kind: Kind
    micro: int
    chunk: int = 0


# -- lists of actions --


def actions(
    schedule: str, stages: int, rank: int, micros: int, chunks: int = 1
) -> list[StageAction]:
    """All actions of `rank` of `stages` in one step, in order.

    F of virtual stage k needs F of k-1, its B needs B of k+1."""
    check(schedule, stages, micros, chunks)
    if schedule == "gpipe":
        return [StageAction("F", i) for i in range(micros)] + [
            StageAction("B", i) for i in range(micros)
        ]
    if schedule == "1f1b":
        return _one_forward_one_backward(stages, rank, micros)
    if schedule == "interleaved":
        return _interleaved(stages, rank, micros, chunks)
    if schedule == "zero_bubble":
        return _zero_bubble(stages, rank, micros)
    raise ValueError(f"schedule {schedule!r} is in SCHEDULES but has no actions here; add them")


def check(schedule: str, stages: int, micros: int, chunks: int = 1) -> None:
    """Raise where the schedule cannot run with these numbers."""
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule={schedule} is unknown; take one of {', '.join(SCHEDULES)}")
    if micros < 1:
        raise PlanError(
            f"micro={micros}, but a step needs one micro-batch at least; set micro=1 or more"
        )
    if schedule != "interleaved" and chunks != 1:
        raise PlanError(
            f"{chunks} chunks per rank have no meaning with schedule={schedule}; "
            "use schedule=interleaved"
        )
    if schedule == "interleaved" and micros % stages:
        near = -(-micros // stages) * stages
        raise PlanError(
            f"schedule=interleaved takes micro-batches in rounds of pipe={stages}, and "
            f"micro={micros} is no multiple of it; set micro={near} or use schedule=1f1b"
        )


def _one_forward_one_backward(p: int, rank: int, m: int) -> list[StageAction]:
    warmup = min(m, p - rank - 1)  # forward passes until the first micro-batch can be back
    made = [StageAction("F", i) for i in range(warmup)]
    for i in range(m - warmup):
        made += [StageAction("F", warmup + i), StageAction("B", i)]
    return made + [StageAction("B", i) for i in range(m - warmup, m)]


def _interleaved(p: int, rank: int, m: int, v: int) -> list[StageAction]:
    def nth(kind: Kind, i: int) -> StageAction:
        turn, rest = divmod(i, p * v)  # p micro-batches go through all chunks, then the next p
        chunk, micro = divmod(rest, p)
        return StageAction(kind, turn * p + micro, chunk if kind == "F" else v - 1 - chunk)

    total = m * v
    warmup = min(total, 2 * (p - rank - 1) + (v - 1) * p)
    made = [nth("F", i) for i in range(warmup)]
    for i in range(total - warmup):
        made += [nth("F", warmup + i), nth("B", i)]
    return made + [nth("B", i) for i in range(total - warmup, total)]


def _zero_bubble(p: int, rank: int, m: int) -> list[StageAction]:
    made = []
    for action in _one_forward_one_backward(p, rank, m):
        made.append(action)
        # W is delayed, so that the ranks before get their gradients sooner
        if action.kind == "B" and action.micro >= rank:
            made.append(StageAction("W", action.micro - rank))
    return made + [StageAction("W", i) for i in range(max(0, m - rank), m)]


# -- formulas --


def bubble(
    schedule: str,
    p: int,
    m: int,
    tF: float = 1.0,
    tB: float = 1.0,
    tW: float = 1.0,
    chunks: int = 1,
) -> float:
    """How long a rank waits in one step, by the formula at the top.

    `simulate` finds the same where m >= p."""
    check(schedule, p, m, chunks)
    if schedule == "zero_bubble":
        # the last rank begins after p-1 forward passes, whatever W hides
        return (p - 1) * (tF + max(0.0, tB - tW))
    return (p - 1) * (tF + tB + tW) / chunks


def bubble_fraction(
    schedule: str,
    p: int,
    m: int,
    tF: float = 1.0,
    tB: float = 1.0,
    tW: float = 1.0,
    chunks: int = 1,
) -> float:
    """The bubble as a fraction of the step's time (not of the ideal time).

    It is (p-1)/(m+p-1) for gpipe and 1f1b."""
    waits = bubble(schedule, p, m, tF, tB, tW, chunks)
    return waits / (waits + m * (tF + tB + tW))


def max_in_flight(schedule: str, p: int, rank: int, m: int, chunks: int = 1) -> int:
    """Micro-batches (of a chunk each) in flight on `rank` at the most."""
    check(schedule, p, m, chunks)
    if schedule == "gpipe":
        return m
    if schedule == "1f1b":
        return min(m, p - rank)
    if schedule == "interleaved":
        return min(m * chunks, 2 * (p - rank - 1) + (chunks - 1) * p + 1)
    if schedule == "zero_bubble":
        return min(m, p)
    raise ValueError(f"schedule {schedule!r} is in SCHEDULES but its memory is not known here")


# -- simulator --


class Simulation(NamedTuple):
    """A simulated step; exchange takes no time."""

    time: float
    bubble: float  # time in which a rank waits: the most over ranks
    in_flight: list[int]  # by rank: micro-batches (of a chunk each) at the most
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
    """Simulate one step. Times are those of a rank's whole part of the model."""
    return simulate_actions(
        [actions(schedule, p, r, m, chunks) for r in range(p)],
        tF / chunks,
        tB / chunks,
        tW / chunks,
    )


Event = tuple[Kind, int, int]  # (kind, micro-batch, virtual stage)


def simulate_actions(
    lists: Sequence[Sequence[StageAction]], tF: float, tB: float, tW: float
) -> Simulation:
    """As `simulate`, for given lists of actions and the times of one chunk."""
    p, v = len(lists), 1 + max((a.chunk for mine in lists for a in mine), default=0)
    splits = any(a.kind == "W" for mine in lists for a in mine)
    seconds: dict[str, float] = {"F": tF, "B": tB if splits else tB + tW, "W": tW}
    ends: dict[Event, float] = {}
    now, at = [0.0] * p, [0] * p
    starts: list[list[tuple[float, StageAction]]] = [[] for _ in range(p)]
    flying, most = [0] * p, [0] * p
    moved = True
    while moved:
        moved = False
        for r, mine in enumerate(lists):
            while at[r] < len(mine):
                a = mine[at[r]]
                k = a.chunk * p + r
                needs = _needs(a, k, last=p * v - 1)
                if not all(n in ends for n in needs):
                    break
                start = max([now[r], *(ends[n] for n in needs)])
                now[r] = ends[a.kind, a.micro, k] = start + seconds[a.kind]
                starts[r].append((start, a))
                flying[r] += (a.kind == "F") - (a.kind == ("W" if splits else "B"))
                most[r] = max(most[r], flying[r])
                at[r] += 1
                moved = True
    if stuck := [r for r in range(p) if at[r] < len(lists[r])]:
        said = ", ".join(f"rank {r} at {lists[r][at[r]]}" for r in stuck)
        raise PlanError(f"the schedule waits for itself: {said}")
    time = max(now)
    busy = [sum(seconds[a.kind] for a in mine) for mine in lists]
    return Simulation(time, time - min(busy), most, starts)


def _needs(action: StageAction, stage: int, last: int) -> list[Event]:
    """What must be over before an action on virtual stage `stage` of 0..`last`."""
    if action.kind == "F":
        return [("F", action.micro, stage - 1)] if stage else []
    if action.kind == "W":
        return [("B", action.micro, stage)]
    needs: list[Event] = [("F", action.micro, stage)]
    if stage < last:
        needs.append(("B", action.micro, stage + 1))
    return needs
