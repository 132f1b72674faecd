"""Contract of every group: one list of checks for every kind, bare and observed.

Processes are forked once for each kind and size, from a server that has torch loaded, and run
the whole list.
"""

from __future__ import annotations

import functools
import hashlib
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from manyhands.core import (
    Group,
)
from manyhands.errors import PlanError
from manyhands.exchange import hierarchical, segments
from manyhands.exchange.inproc import World
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.solo import SoloGroup
from support.group_checks import CHECKS, TIMEOUT_S, Case
from support.processes import start

CASES = [
    Case("solo", "a"),
    *(Case("inproc", "a" * n) for n in range(1, 9)),
    *(Case("shared", "a" * n) for n in (1, 2, 3, 4, 8)),
    *(Case("gloo", "a" * n) for n in (1, 2, 3)),
    *(Case("hierarchical", hosts) for hosts in ("aa", "aba", "aabb", "aaabbbcc")),
]
# more ranks of what fewer show too: whoever changes a link runs these with -m slow
LARGER = {
    "inproc-5",
    "inproc-6",
    "inproc-7",
    "inproc-8",
    "shared-4",
    "shared-8",
    "hierarchical-aaabbbcc",
}


def some(wanted: Callable[[Case], bool]) -> list[Any]:
    larger = {True: (pytest.mark.slow,), False: ()}
    return [pytest.param(c, id=str(c), marks=larger[str(c) in LARGER]) for c in CASES if wanted(c)]


# -- running them --

OBSERVED = {
    name: f for name, f in CHECKS.items() if "staging_buffer" not in name and "mailbox" not in name
}  # who watches does not see the buffer

Outcomes = dict[
    tuple[bool, str], str
]  # (observed, check) -> hash of the results, or what went wrong


def run_checks(group: Group) -> Outcomes:
    outcomes: Outcomes = {}
    for observed in (False, True):
        over = ObservedGroup(group, lambda event: None) if observed else group
        for name, f in (OBSERVED if observed else CHECKS).items():
            try:
                digest = hashlib.sha256()
                for x in f(over):
                    digest.update(
                        x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    )
                outcomes[observed, name] = digest.hexdigest()
            except Exception:  # the ranks are out of step now: what follows would only confuse
                outcomes[observed, name] = f"rank {group.rank}:\n{traceback.format_exc()}"
                return outcomes
    return outcomes


def be_a_rank(case: Case, rank: int, port: int, parent: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = case.connect(rank, store)
    outcomes = run_checks(group)
    group.close()
    left = [p.name for p in segments.directory().glob(f"{segments.PREFIX}{os.getpid()}-*")]
    parent.send((outcomes, left))


@functools.cache
def outcomes_of(case: Case) -> list[Outcomes]:
    """Every rank's outcomes."""
    if case.kind == "solo":
        return [run_checks(SoloGroup())]
    if case.kind == "inproc":
        return World(case.size).run(run_checks)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(be_a_rank, (case, rank, store.port)) for rank in range(case.size)]
    reports = []
    for rank, (process, pipe) in enumerate(ranks):
        if not pipe.poll(2 * TIMEOUT_S):
            process.kill()
            reports.append(
                {(o, n): f"rank {rank} did not report" for o in (False, True) for n in CHECKS}
            )
            continue
        outcomes, left = pipe.recv()
        outcomes[False, "shared memory"] = repr(left)
        reports.append(outcomes)
    for process, _ in ranks:
        process.join()
    return reports


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("case", some(lambda c: True))
def test_contract(case: Case, name: str) -> None:
    assert_kept(case, name, observed=False)


@pytest.mark.parametrize("name", OBSERVED)
@pytest.mark.parametrize("case", some(lambda c: True))
def test_contract_observed(case: Case, name: str) -> None:
    assert_kept(case, name, observed=True)


def assert_kept(case: Case, name: str, observed: bool) -> None:
    outcomes = [
        mine.get((observed, name), "not reached: an earlier check failed")
        for mine in outcomes_of(case)
    ]
    broken = [text for text in outcomes if len(text) != 64]
    assert not broken, "\n".join(broken)
    assert len(set(outcomes)) == 1, f"ranks hold different bits: {outcomes}"


@pytest.mark.parametrize("case", some(lambda c: c.kind not in ("solo", "inproc")))
def test_no_shared_memory_is_left_behind(case: Case) -> None:
    assert [mine[False, "shared memory"] for mine in outcomes_of(case)] == ["[]"] * case.size


@pytest.mark.parametrize("case", some(lambda c: c.kind in ("solo", "inproc")))
def test_every_kind_is_a_group(case: Case) -> None:
    links: list[Any] = (
        [SoloGroup()] if case.kind == "solo" else World(case.size).run(lambda group: group)
    )
    for rank, group in enumerate(links):
        assert isinstance(group, Group) and (group.rank, group.size) == (rank, case.size)
        assert isinstance(ObservedGroup(group, lambda event: None), Group)


def test_who_is_alone_swaps_with_nobody_else() -> None:
    with pytest.raises(ValueError, match="rank 0 is alone"):
        SoloGroup().swap({}, [1])


def test_who_is_alone_writes_to_nobody_else() -> None:
    with pytest.raises(ValueError, match="rank 0 transfers from rank 1, but rank 0 is alone"):
        SoloGroup().transfer({}, {1: torch.ones(1)})


def test_every_rank_needs_a_host() -> None:
    with pytest.raises(PlanError, match="2 host names for 3 ranks"):
        hierarchical.connect(0, 3, ["a", "b"], dist.HashStore())
