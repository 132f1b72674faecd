"""Elastic job: what the launcher is told of a run whose processes may die."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import torch

from manyhands.assembly.rank_context import Options
from manyhands.assembly.tables import server_options
from manyhands.core import ElasticJob, Group, Plan
from manyhands.plan.checks import elastic_bounds

ELASTIC_RESTARTS = 3  # of an elastic run, where restarts= says nothing


def restarts_of(plan: Plan) -> int:
    """Processes that may be started in place of dead ones, within `restart_window_s`."""
    if not plan.respawn:
        return 0
    return ELASTIC_RESTARTS if plan.restarts is None else plan.restarts


def elastic_job(plan: Plan, options: Options) -> ElasticJob | None:
    if plan.elastic is None:
        return None
    least, most = elastic_bounds(plan.elastic)
    if between_ranks(plan):
        return ElasticJob(
            least,
            restarts_of(plan),
            0,
            plan.timeout_s,
            most=most,
            inner=plan.layout.size // plan.layout.data,
            window_s=plan.restart_window_s,
            spares=plan.spares,
            wait_s=plan.wait_s,
            directory=str(options.directory),
            needs=needs(options),
        )
    servers = server_options(plan, Path(str(options.directory)))
    return ElasticJob(
        least,
        restarts_of(plan),
        plan.servers,
        plan.timeout_s,
        servers,
        window_s=plan.restart_window_s,
    )


def needs(options: Options) -> dict[str, Any]:
    """What a process from outside must have to take part in a run, and with what it begins."""
    script = Path(options.script) if options.script else None
    return {
        "version": manyhands_version(),
        "torch": str(torch.__version__),
        "python": ".".join(map(str, sys.version_info[:2])),
        "words": options.words,
        "script": options.script,
        "digest": hashlib.sha256(script.read_bytes()).hexdigest()[:16] if script else "",
        "arguments": list(options.arguments),
        "options": options.to_json(),
    }


def manyhands_version() -> str:
    """As installed; "source": it runs from a checkout that was not."""
    try:
        return importlib.metadata.version("manyhands")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def between_ranks(plan: Plan) -> bool:
    """Whether ranks of an elastic run merge with each other, not over servers."""
    return plan.elastic is not None and plan.strategy.link is Group
