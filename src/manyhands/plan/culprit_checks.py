"""Checks of what a plan does with ranks that hang or are slow."""

from __future__ import annotations

from manyhands.core import Plan
from manyhands.errors import PlanError


def check_culprits(plan: Plan) -> None:
    for word in ("hang", "straggler"):
        if getattr(plan, word) == "exclude" and plan.elastic is None:
            raise PlanError(
                f"{word}=exclude goes on without a rank, which a run can only do where ranks may "
                f"come and go; add elastic=1:{max(2, plan.layout.data)}, or leave {word}= out"
            )
    if plan.straggler == "rebalance":
        _check_rebalance(plan)


def _check_rebalance(plan: Plan) -> None:
    """Only where gradients and samples are summed does a smaller batch weigh what it should."""
    for word in ("merge", "then"):
        if getattr(plan, word) not in (None, "all_reduce"):
            raise PlanError(
                f"straggler=rebalance with {word}={getattr(plan, word)}: its replicas weigh the "
                "same, however few samples one has; use merge=all_reduce or straggler=report"
            )
    if plan.elastic is not None:
        raise PlanError(
            f"straggler=rebalance with elastic={plan.elastic}: shares are agreed between ranks "
            "that stay; use straggler=exclude, or leave elastic= out"
        )
    if plan.batchnorm == "local":
        raise PlanError(
            "straggler=rebalance with batchnorm=local: each rank normalises over its own batch, "
            "whose size would change; leave batchnorm= out"
        )
