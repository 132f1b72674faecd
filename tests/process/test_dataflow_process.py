"""Graphs over real processes: the numbers of one process, over shared memory and gloo."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from manyhands.core import Group
from support.compare import assert_gradients_close
from support.dataflow import branched, graphed, partition_of
from support.pipelines import GivenBatches, alone, gradients, scaled_by_count, step
from support.processes import on_ranks

SIZES = (4, 4, 3, 4)
LINKS = ("shared", "gloo")
NAMES = ("towers", "inception")


def every_model(group: Group) -> dict[str, Any]:
    """Two steps of each: shapes are described in the first and known in the second."""
    found: dict[str, Any] = {}
    for name in NAMES:
        model, loss, data = branched(name)
        graph = graphed(
            group, partition_of(model, tuple(v[:4] for v in data[:-1]), group.size), loss
        )
        steps = GivenBatches([*step(data, SIZES), *step(data, SIZES)])
        losses = [
            (float(total), count)
            for total, count in (graph(scaled_by_count, steps) for _ in range(2))
        ]
        found[name] = (
            losses,
            {n: g.numpy() for n, g in gradients([graph.stage]).items() if g is not None},
        )
    return found


@functools.cache
def ran(link: str) -> list[dict[str, Any]]:
    return on_ranks(link, 3, every_model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("link", LINKS)
def test_processes_that_share_a_graph_get_the_losses_and_gradients_of_one(
    link: str, name: str
) -> None:
    model, loss, data = branched(name)
    expected = [alone(model, loss, step(data, SIZES)) for _ in range(2)]
    merged: dict[str, Any] = {}
    for mine in ran(link):
        losses, grads = mine[name]
        assert losses == [(pytest.approx(total, rel=1e-12), count) for total, count in expected]
        merged |= {n: torch.from_numpy(g) for n, g in grads.items()}
    assert_gradients_close(merged, {n: w.grad for n, w in model.named_parameters()})
