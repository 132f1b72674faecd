"""Runs in one pool of processes: a body that gets the plan words, to vary them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from manyhands import entry
from manyhands.assembly.rank_context import Options
from manyhands.core import Plan, Result
from manyhands.plan import words as plan_words


def start(body: Callable[[Any, Options], dict[str, Any]], words: str, options: Options) -> Result:
    """As `entry.start`, for bodies that train several times, each under these words and more."""
    given = plan_words.overlay(words)
    return entry.start(functools.partial(_with_words, body, given), words, options)


def _with_words(
    body: Callable[[Any, Options], dict[str, Any]],
    words: dict[str, Any],
    plan: Plan,
    options: Options,
) -> dict[str, Any]:
    return body(words, options)
