"""Checks of a plan whose ranks step one parameter vector in shared memory (`merge=hogwild`)."""

from __future__ import annotations

from typing import Any

from manyhands.core import Plan, Strategy
from manyhands.errors import PlanError

LINKS = ("auto", "shared")


def check_common_parameters(plan: Plan) -> None:
    """What ranks with one parameter vector, each at its own pace, can be combined with."""
    used: dict[str, Strategy[Any, Any] | None] = {
        "merge": plan.strategy,
        "then": plan.next_strategy,
    }
    words = {w: s.shares_parameters for w, s in used.items() if s is not None}
    if not any(words.values()):
        return
    first = next(word for word, shares in words.items() if shares)
    word = f"{first}={getattr(plan, first)}"
    _check_memory(plan, word)
    if plan.elastic is not None:
        raise PlanError(
            f"elastic={plan.elastic} with {word}: a rank that dies in the middle of a step leaves "
            "half of it in the parameters of all, and no rank has the state before; leave elastic= "
            "out, or use merge=all_reduce"
        )
    if plan.servers:
        raise PlanError(
            f"servers={plan.servers} with {word}: parameters are in the memory of the ranks' host, "
            "not on servers; leave servers= out and use nn.Embedding(sparse=True) for tables, or "
            "use merge=downpour"
        )
    if plan.batchnorm == "sync":
        raise PlanError(
            f"batchnorm=sync makes ranks wait for each other in every layer, which {word} avoids; "
            "set batchnorm=local"
        )
    if all(words.values()):
        _check_exchange(plan, word)


def _check_memory(plan: Plan, word: str) -> None:
    if plan.device == "cuda":
        raise PlanError(
            f"device=cuda with {word}: ranks step one parameter vector in the memory of their "
            "host; set device=cpu, or use merge=all_reduce"
        )
    if plan.link not in LINKS:
        raise PlanError(
            f"link={plan.link} with {word}: ranks step one parameter vector in shared memory of "
            "one host; leave link= out (or link=shared), or use merge=downpour servers=1"
        )


def _check_exchange(plan: Plan, word: str) -> None:
    """Words about what ranks send, where they send nothing at any time."""
    for key in ("algorithm", "bucket_mb"):
        if (given := getattr(plan, key)) != Plan.__dataclass_fields__[key].default:
            raise PlanError(
                f"{key}={given} has no effect: {word} sends nothing, ranks share memory; "
                "leave it out"
            )
