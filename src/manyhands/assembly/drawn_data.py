"""Data that a user's own loop draws itself: which words of a plan mean nothing there."""

from __future__ import annotations

import dataclasses

from torch import nn

from manyhands.core import Plan
from manyhands.embedding.tables import embeddings
from manyhands.errors import PlanError, TaskError


def drawn_plan(plan: Plan) -> Plan:
    """The plan of a run whose script draws its own batches: one of each rank is a step."""
    words = {
        f"batch={plan.batch}": plan.batch is not None,
        f"micro={plan.micro}": plan.micro is not None,
        f"loaders={plan.loaders}": plan.loaders is not None,
        f"split={plan.split}": plan.split != "auto",
        "straggler=rebalance": plan.straggler == "rebalance",
    }
    for word, given in words.items():
        if given:
            raise PlanError(
                f"{word} has no effect: run.prepare was given no data, so the script draws its own "
                f"batches; leave {word.partition('=')[0]} out, or give run.prepare the data"
            )
    return dataclasses.replace(plan, batch=1, split="ordered")


def check_drawn(model: nn.Module) -> None:
    if found := embeddings(model):
        raise TaskError(
            f"mh.Embedding {found[0].name!r} looks its rows up before a batch is computed, but "
            "run.prepare was given no data, so nobody knows the batch; give run.prepare the data, "
            "or use nn.Embedding"
        )
