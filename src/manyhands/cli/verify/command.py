"""Verify command: compare a few steps under the plan with one process, and give a verdict."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from manyhands.cli.verify.comparison import compare, script_task
from manyhands.cli.verify.deviation import CEILING, KINDS, ROUNDINGS, Deviation
from manyhands.core import Plan, Store
from manyhands.entry import defines_task
from manyhands.errors import PlanError
from manyhands.merge.stale_sync import StaleSync
from manyhands.plan import words as plan_words

NAMES = {"loss": "loss", "gradient": "gradients", "parameter": "parameters"}


def verify(script: Path, words: list[str], steps: int = 5, float32: bool = False) -> bool:
    """Print the comparison and return whether the plan equals one process."""
    if not defines_task(script):
        raise PlanError(
            f"{script} defines no task(), which verify needs to run it twice; "
            "wrap model, data and optimizer into task()"
        )
    plan = plan_words.parse(words)
    deviation = compare(functools.partial(script_task, str(script)), plan, steps, float32)
    compared = KINDS if plan.strategy.replicas_agree else ("parameter",)
    print(plan_words.brief(plan))
    print(
        f"{steps} steps on {plan.layout.size} ranks against one process, "
        f"in {'float32' if float32 else 'float64'}: largest relative deviation of"
    )
    if len(compared) == 1:
        print(
            f"  (loss and gradients differ between ranks under merge={plan.merge}; "
            "only the merged model is compared)"
        )
    for kind in compared:
        print(f"  {NAMES[kind]:11s} {getattr(deviation, kind):.2e}")
    if deviation.noise:
        print(f"not compared, gradient zero except for rounding: {', '.join(deviation.noise)}")
    if deviation.lifted:
        _print_rounding(deviation, compared, torch.float32 if float32 else torch.float64)
    _print_verdict(deviation, compared)
    if not (deviation.equal or deviation.undecided):
        _print_reasons(plan)
    return deviation.equal


def _print_rounding(deviation: Deviation, compared: Sequence[str], given: torch.dtype) -> None:
    """Why the bound is wider here, and by how much."""
    inside = deviation.computes_in
    if inside is not None and torch.finfo(inside).eps > torch.finfo(given).eps:
        reason = f"the model computes partly in {str(inside).removeprefix('torch.')}"
    else:
        reason = "the model or its optimizer amplifies rounding"
    moved = ", ".join(f"{NAMES[k]} {deviation.rounding[k]:.1e}" for k in compared)
    print(
        f"{reason}: one rounding of every operation moves, on one process, {moved}; "
        f"bounds are {ROUNDINGS:g} times that, at least {deviation.rtol:g}, at most {CEILING:g}"
    )


def _print_verdict(deviation: Deviation, compared: Sequence[str]) -> None:
    bounds = ", ".join(f"{NAMES[k]} {deviation.bound(k):.1e}" for k in compared)
    if deviation.equal:
        if deviation.lifted:
            print(f"EQUAL up to rounding (bounds: {bounds})")
        else:
            print(f"EQUAL up to the order of summation (bound {deviation.rtol:g})")
        return
    if deviation.undecided:
        print(
            "UNDECIDED: rounding alone explains these deviations, but it could hide an error. "
            "Compare fewer steps (--steps 1), with a smaller learning rate, or without the part "
            "that computes in low precision. By module, largest first:"
        )
    else:
        bound = bounds if deviation.lifted else f"{deviation.rtol:g}"
        print(f"DIFFERENT: more than {bound}. By module, largest first:")
    for name, value in sorted(deviation.by_module.items(), key=lambda kv: -kv[1]):
        print(f"  {value:.2e}  {name or '(top)'}")


def _print_reasons(plan: Plan) -> None:
    """Words of the plan that make it another computation on purpose."""
    if plan.merge != "all_reduce" or plan.codec is not None:
        print(
            "this merge strategy or this compression changes the method on purpose; it equals one "
            "process only in special cases (merge.period=1 with plain SGD, say): see "
            "docs/strategies"
        )
    if plan.strategy.link is Store and plan.strategy != StaleSync(staleness=0):
        print(
            f"merge={plan.merge} over servers lets ranks compute on models of different age; "
            "staleness=0 waits for all and equals one process"
        )
    if plan.batchnorm == "local":
        print(
            "batchnorm=local uses statistics of each rank's own batch, which is another "
            "computation; batchnorm=sync equals one process"
        )
