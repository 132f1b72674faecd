"""Checks of a plan whose model is split over ranks."""

from __future__ import annotations

from manyhands.core import Plan, Store
from manyhands.errors import PlanError
from manyhands.plan.checks import AXIS_WORDS, default
from manyhands.plan.vocabulary import AXES


def check_model_parallel(plan: Plan) -> None:
    """What a model that is split over ranks can be combined with."""
    layout = plan.layout
    for word, axis in AXIS_WORDS.items():
        value = getattr(plan, word)
        if getattr(layout, axis) == 1 and value != default(word):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            raise PlanError(
                f"{word}={text} has no effect without {axis}=; add {axis}=2, say, or leave it out"
            )
    if plan.split == "by_feature" and (layout.tensor == 1 or layout.pipe * layout.shard > 1):
        raise PlanError(
            "split=by_feature splits columns over tensor=, and nothing else may split the model; "
            "set tensor=2, say, alone or with data="
        )
    used = [f"{a}={getattr(layout, a)}" for a in AXES if a != "data" and getattr(layout, a) > 1]
    if used:
        _check_split(plan, " x ".join(used), used[0])
        _check_schedule(plan)


def _check_split(plan: Plan, split: str, first: str) -> None:
    if plan.strategy.link is Store or plan.servers:
        raise PlanError(
            f"servers hold whole models, and {split} splits the model over ranks; "
            f"leave out {first} or servers="
        )
    if plan.precision == "fp16":
        raise PlanError(
            "precision=fp16 needs one loss scale for all parts of the model, which "
            f"{split} does not have; set precision=bf16"
        )
    if any(s is not None and s.distils for s in (plan.strategy, plan.next_strategy)):
        raise PlanError(
            f"merge={plan.merge} runs other ranks' models, which {split} splits; "
            "use another strategy"
        )
    for word, strategy in (("merge", plan.strategy), ("then", plan.next_strategy)):
        if strategy is not None and strategy.shares_parameters:
            raise PlanError(
                f"{word}={getattr(plan, word)} has one parameter vector for all ranks, and {split} "
                f"splits the model over ranks; leave out {first}, or use merge=all_reduce"
            )
    for word in ("at", "until"):
        if (goal := getattr(plan, word)) is not None and goal.name == "noise":
            raise PlanError(
                f"{word}={goal}: the noise scale is measured on whole gradients, which "
                f"{split} splits; use another goal"
            )


def _check_schedule(plan: Plan) -> None:
    layout = plan.layout
    if plan.cut == "graph" and plan.schedule != default("schedule"):
        raise PlanError(
            f"schedule={plan.schedule} has no effect: with cut=graph the order follows from the "
            "graph; leave it out"
        )
    if layout.shard > 1 and plan.schedule == "interleaved":
        raise PlanError(
            "schedule=interleaved gives a rank several stages, which "
            f"shard={layout.shard} does not know; use schedule=1f1b"
        )
    if layout.shard > 1 and plan.zero == 3 and (plan.schedule == "zero_bubble" or plan.compile):
        word = "compile=true" if plan.compile else "schedule=zero_bubble"
        raise PlanError(
            f"{word} would not see when zero=3 gathers and releases parameters; set zero=2, or "
            f"leave {word} out"
        )
    if layout.pipe > 1 and plan.compile:
        raise PlanError(
            f"compile=true compiles a whole model, and pipe={layout.pipe} cuts it into stages; "
            "leave compile out"
        )
