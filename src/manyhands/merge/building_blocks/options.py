"""Checks of hyper-parameters: an option that cannot be raises PlanError in the plan's words."""

from typing import Literal, get_args

from manyhands.errors import PlanError

Moments = Literal["keep", "average", "reset"]


def need(holds: bool, given: str, needed: str) -> None:
    """Raise PlanError unless `holds`. Write the condition so that NaN fails it."""
    if not holds:
        raise PlanError(f"merge.{given}: {needed}")


def check_period(period: int) -> None:
    """At least one local step between two merges."""
    need(
        period >= 1,
        f"period={period}",
        "at least 1 local step is needed between two merges; set merge.period=1 or more",
    )


def check_block(period: int, moments: str) -> None:
    """The options of a block of local steps."""
    check_period(period)
    need(
        moments in get_args(Moments),
        f"moments={moments}",
        f"one of {', '.join(get_args(Moments))} is needed",
    )
