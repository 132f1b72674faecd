"""Where a model is cut: as evenly as its times allow, and within the memory that a rank has."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.assembly import stage_cuts
from manyhands.assembly.memory import room
from manyhands.errors import PlanError
from manyhands.parallel.pipeline.node_costs import NodeCost
from manyhands.parallel.trace.trace_model import trace
from manyhands.plan import words

WIDTHS = (64, 64, 64, 64, 64, 1)
KEPT = 100  # bytes of activations of a layer, of the rows that are measured
BIG = 4 * 4 * 65 * 64  # bytes of a layer with gradient and Adam's state, of all but the last


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)))


def task() -> mh.Task:
    x = torch.randn(64, 64)
    return mh.Task(
        model=model(),
        loss=nn.functional.mse_loss,
        train=(x, x[:, :1]),
        optimizer=lambda p: torch.optim.Adam(p),
        batch=32,
    )


def context(anyway: bool = False) -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"),
        process=SimpleNamespace(local_size=2),
        options=SimpleNamespace(anyway=anyway),
    )


def begin(
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
    anyway: bool = False,
    line: str = "pipe=2 micro=4",
) -> int:
    """The step at which the second stage begins, where steps take as long as they say."""
    made, example = task(), (torch.randn(16, 64),)
    traced = trace(made.model, example, pieces=2)
    seconds = (1.0, 1.0, 1.0, 1.0, 4.0)
    costs = [
        NodeCost(s, KEPT, sum(p.nbytes for p in layer.parameters()), 64.0)
        for s, layer in zip(seconds, made.model, strict=True)
    ]
    monkeypatch.setattr(stage_cuts.node_costs, "measure", lambda *_: costs)
    monkeypatch.setattr(stage_cuts, "room", lambda *_: (limit, 4.0))
    (found,) = stage_cuts._balanced(context(anyway), words.parse(line), traced, example, 2, made)
    return found


def test_a_cut_that_would_be_faster_is_not_taken_where_a_stage_would_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = (
        2 * 2 * KEPT
    )  # of a layer: two micro-batches in flight, of twice the rows that were measured
    assert begin(monkeypatch, 1e9) == 4  # four seconds each
    assert begin(monkeypatch, 4 * (BIG + kept)) == 4
    assert begin(monkeypatch, 4 * (BIG + kept) - 1) == 3
    assert (
        begin(monkeypatch, 4 * BIG, line="pipe=2 micro=4 recompute=true") == 4
    )  # activations are not kept
    assert begin(monkeypatch, 3 * BIG, anyway=True) == 4
    assert begin(monkeypatch, BIG) == 4  # nothing fits: what is forecast will say so


def test_a_rank_holds_parameters_gradients_and_what_the_optimizer_keeps() -> None:
    made = task()
    available, times = room(context(), made.model, made)
    assert times == pytest.approx(4.0, rel=0.01) and available > 2**20
    made = mh.Task(
        model=model(),
        loss=nn.functional.mse_loss,
        train=made.train,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    assert room(context(), made.model, made)[1] == 2.0


def test_where_nothing_can_be_cut_the_first_reason_is_told() -> None:
    def cut(limit: float | None) -> None:
        raise PlanError("too many stages" if limit is None else "no room")

    with pytest.raises(PlanError, match="too many"):
        stage_cuts._within(cut, 10.0)
