"""Watchers of two ranks over a real store: what they say, and whom they ask to leave out."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from manyhands.assembly.culprits.watcher import Watcher, _same_work
from manyhands.core import Event, Layout, ProcessInfo
from manyhands.exchange.observed import ObservedGroup
from manyhands.exchange.solo import SoloGroup
from manyhands.launch import environment, run_token
from manyhands.plan.words import parse

LIMIT_S = 20.0
STALL = "stall_s=0.5"


class Rank:
    """A rank whose training thread is played by the test."""

    def __init__(self, rank: int, store: dist.Store, words: str):
        self.events: list[Event] = []
        self.group = ObservedGroup(SoloGroup(), self.events.append)
        recorder = SimpleNamespace(emit=self.events.append, flush=lambda: None)
        self.context = SimpleNamespace(
            process=ProcessInfo(rank, 2, rank, 2, "a", machine="m"),
            plan=parse(words),
            store=store,
            group=self.group,
            recorder=recorder,
            leads=rank == 0,
            interruption=None,
        )
        self.watcher = Watcher(cast(Any, self.context))

    def rounds(self, number: int = 5) -> None:
        activity = self.group.activity
        for round in range(activity.round + 1, activity.round + 1 + number):
            self.group.round = round
            activity.end_round(round, 0.0)
        self.group.round += 1

    def said(self, name: str) -> list[str]:
        return [str(e.value) for e in self.events if e.name == name]


@pytest.fixture
def store() -> dist.Store:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.PrefixStore("run/0", server)


@contextlib.contextmanager
def ranks(store: dist.Store, words: str = f"data=2 {STALL}") -> Iterator[list[Rank]]:
    both = [Rank(r, store, words) for r in range(2)]
    try:
        yield both
    finally:
        for rank in both:
            rank.watcher.close()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_computes_while_the_other_waits_is_said_once_and_so_is_its_end(
    store: dist.Store,
) -> None:
    with ranks(store) as (first, second):
        for rank in (first, second):
            rank.rounds()
        first.group.enter("all_reduce")
        until(lambda: bool(first.said("stalled")))
        (text,) = first.said("stalled")
        assert f"rank 1 (host a, pid {os.getpid()}) is in compute; no round has ended for" in text
        assert "test_watcher.py" in text  # the stack of the training thread
        assert "rank 0 waits for it in all_reduce #1" in text
        for rank in (first, second):
            rank.rounds()
            rank.group.activity.leave()
        until(lambda: bool(first.said("stall over")))
        assert len(first.said("stalled")) == 1 and not second.said("stalled")


def test_the_second_rank_speaks_where_the_first_is_silent(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with ranks(store) as (first, second):
        for rank in (first, second):
            rank.rounds()
        until(lambda: store.check(["heartbeat/0"]))
        first.watcher._end.set()  # as if it were stopped
        second.group.enter("all_reduce")
        until(lambda: bool(second.said("stalled")))
        assert "no heartbeat for" in second.said("stalled")[0]
        assert "rank 1 waits for it in all_reduce" in capsys.readouterr().err


def test_hang_exclude_asks_the_launcher_to_go_on_without_the_process(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.RUN_TOKEN, "secret")
    with ranks(store, f"data=2 elastic=1:2 hang=exclude {STALL}") as (first, second):
        for rank in (first, second):
            rank.rounds()
        first.group.enter("all_reduce")
        until(lambda: store.check(["hung/1"]))
        assert run_token.verify("secret", "hung/1", store.get("hung/1")) == str(os.getpid())
        assert not store.check(["hung/0"])


def test_a_rank_in_a_long_phase_and_one_at_its_start_are_left_alone(store: dist.Store) -> None:
    with ranks(store) as (first, second):
        first.rounds()
        first.group.enter("all_reduce")
        second.rounds()
        with second.group.activity.during("evaluation"):
            beaten = second.watcher.own._number
            until(lambda: second.watcher.own._number > beaten + 15)  # 1.5 s, thrice the limit
        assert not first.said("stalled")


def test_watching_goes_on_where_the_store_fails_for_a_while(store: dist.Store) -> None:
    with ranks(store) as (first, second):
        failed = io.StringIO()

        class Broken:
            def set(self, *_: Any) -> None:
                failed.write("x")
                raise RuntimeError("connection reset")

        first.watcher._store = cast(Any, Broken())
        until(lambda: bool(failed.getvalue()))
        for rank in (first, second):
            rank.rounds()
        first.group.enter("all_reduce")
        until(lambda: bool(first.said("stalled")))


def test_only_ranks_with_the_same_part_of_the_model_are_compared() -> None:
    assert _same_work(Layout(data=3)) == [[0, 1, 2]]
    assert _same_work(Layout(data=2, tensor=2)) == [[0, 2], [1, 3]]
    assert _same_work(Layout(pipe=2)) == []
