"""Pipelines over real processes: the numbers of one process, and the bubble of theory.

Processes are forked once for each kind of group, from a server that has torch loaded, and run
the whole list of cases.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.core import Event, Group
from manyhands.exchange.mailbox import CHUNK_BYTES, SLOTS
from manyhands.observe.bubble import bubble
from manyhands.split.schedules import SCHEDULES
from support.compare import assert_gradients_close
from support.pipelines import (
    GivenBatches,
    alone,
    chain,
    gradients,
    in_zoo,
    piped,
    scaled_by_count,
    step,
    traced,
)
from support.processes import on_ranks

WIDE = SLOTS * CHUNK_BYTES // (8 * 4) + 101  # four rows of float64 are more than a mailbox holds
SIZES = (4, 4, 3, 4)
LINKS = ("shared", "gloo")


# -- the numbers of one process --


def wide() -> list[nn.Module]:
    torch.manual_seed(0)
    sizes = (6, WIDE, 6, WIDE, 6, WIDE, 6, WIDE, 5)
    return [nn.Linear(a, b).double() for a, b in itertools.pairwise(sizes)]


def wide_data() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, dtype=torch.float64, generator=chance), torch.arange(16) % 5


Found = dict[str, tuple[list[tuple[float, int]], dict[Any, Any]]]  # losses and gradients by case


CASES = [("wide", schedule) for schedule in SCHEDULES] + [("gpt", "1f1b")]


def every_case(group: Group) -> Found:
    """Two steps of each: shapes are described in the first and known in the second."""
    found: Found = {}
    for name, schedule in CASES:
        chunks = 2 if schedule == "interleaved" else 1
        stages: list[Any]
        loss: Callable[..., Tensor]
        if name == "wide":
            stages, loss, data = (
                [*chain(wide(), group.size * chunks)],
                nn.functional.cross_entropy,
                wide_data(),
            )
        else:
            model, loss, data = in_zoo(name)
            stages = traced(model, tuple(v[:4] for v in data[:-1]), group.size * chunks)
        pipeline = piped(group, schedule, chunks, stages, loss)
        steps = GivenBatches([*step(data, SIZES), *step(data, SIZES)])
        got = []
        for _ in range(2):
            for s in stages:
                s.module.zero_grad()  # as the gradient window does before every step
            total, count = pipeline(scaled_by_count, steps)
            got.append((float(total), count))
        kept: dict[Any, Any] = gradients(stages)
        if name == "wide":  # by the order of the whole model
            kept = dict(enumerate(w.grad for s in stages for w in s.module.parameters()))
        found[f"{name} {schedule}"] = got, {n: g.numpy() for n, g in kept.items() if g is not None}
    return found


@functools.cache
def ran(link: str) -> list[Found]:
    return on_ranks(link, 2, every_case)


@functools.cache
def expected(name: str) -> tuple[list[tuple[float, int]], dict[Any, Any]]:
    loss: Callable[..., Tensor]
    if name == "wide":
        model, loss, data = nn.Sequential(*wide()), nn.functional.cross_entropy, wide_data()
        named = list(enumerate(model.parameters()))
    else:
        model, loss, data = in_zoo(name)
        named = list(model.named_parameters())
    got = []
    for _ in range(2):
        model.zero_grad()
        got.append(alone(model, loss, step(data, SIZES)))
    return got, {n: w.grad for n, w in named}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_processes_get_the_losses_and_gradients_of_one(link: str, name: str, schedule: str) -> None:
    losses, grads = expected(name)
    merged: dict[Any, Any] = {}
    for mine in ran(link):
        got, some = mine[f"{name} {schedule}"]
        assert got == [(pytest.approx(total, rel=1e-12), count) for total, count in losses]
        merged |= {n: torch.from_numpy(g) for n, g in some.items()}
    assert_gradients_close(merged, grads)


# -- the bubble --

PAUSE_S = 0.06
REPEATS = 2


class Pause(torch.autograd.Function):
    """Time passes on the way back. No core is needed for it, so that more stages than cores do not
    disturb each other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return grads[0]


class Padded(nn.Module):
    """A layer of which forward, the gradient of its input and the gradient of its weight take the
    same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(5))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return Pause.apply(x @ Pause.apply(self.weight))


MICROS = (2, 4, 8, 16)


def paused(group: Group) -> list[Event]:
    seen: list[Event] = []
    x, y = torch.randn(64, 5), torch.zeros(64, dtype=torch.long)
    for i, schedule in enumerate(("gpipe", "1f1b", "zero_bubble")):
        pipeline = piped(
            group,
            schedule,
            1,
            chain([Padded() for _ in range(group.size)], group.size),
            nn.functional.cross_entropy,
        )
        pipeline(
            scaled_by_count, GivenBatches(step((x, y), (4, 4)))
        )  # makes the mailboxes, describes the shapes
        pipeline._emit = seen.append
        for m in MICROS:
            for repeat in range(REPEATS):
                pipeline.round = 1000 * i + 10 * m + repeat
                group.all_reduce({"together": torch.ones(1)}).wait()
                pipeline(scaled_by_count, GivenBatches(step((x, y), (4,) * m)))
    return seen


@pytest.mark.slow
def test_the_measured_bubble_is_that_of_the_formula_and_zero_bubble_has_a_smaller_one() -> None:
    p = 4
    events = [e for mine in on_ranks("shared", p, paused) for e in mine]

    def measured(i: int, m: int) -> float:
        """The least of all repeats: whatever else the machine does can only add to it."""
        found = [
            bubble([e for e in events if e.round == 1000 * i + 10 * m + r]) for r in range(REPEATS)
        ]
        return min(b for b in found if b is not None)

    for m in MICROS:
        formula = (p - 1) / (m + p - 1)
        gpipe, one, zero = (measured(i, m) for i in range(3))
        print(
            f"m={m}: formula {formula:.3f}, gpipe {gpipe:.3f}, 1f1b {one:.3f}, zero_bubble "
            f"{zero:.3f}"
        )
        assert gpipe == pytest.approx(formula, rel=0.15)
        assert one == pytest.approx(formula, rel=0.15)
        assert zero < one
