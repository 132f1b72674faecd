"""Epoch follower: how a rank learns of epochs, over a real rendezvous store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from manyhands.core import ProcessInfo
from manyhands.errors import LaunchError
from manyhands.launch import environment, run_token
from manyhands.launch.elastic.epoch_follower import EpochFollower
from manyhands.launch.elastic.worker_replacements import run_keys, tell
from manyhands.membership.rank_epochs import RankEpoch

TOKEN, LIMIT_S = "secret", 20.0
FIRST = RankEpoch(1, (0, 1), 2, planned=True)
LOSS = RankEpoch(2, (1,), 1, why="rank 0 died")
JOIN = RankEpoch(3, (2, 1), 2, planned=True)


class Rendezvous:
    """The launcher's side, and followers of it."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.keys = run_keys(self.store)
        self.followers: list[EpochFollower] = []

    def follower(self, member: int) -> EpochFollower:
        self.followers.append(EpochFollower(member, ProcessInfo(), self.keys))
        return self.followers[-1]

    def publish(self, *epochs: RankEpoch) -> None:
        for epoch in epochs:
            key = f"epoch/{epoch.number}"
            self.keys.set(key, run_token.sign(TOKEN, key, epoch.encode()))


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    made = Rendezvous()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(made.store.port))
    monkeypatch.setenv(environment.RUN_TOKEN, TOKEN)
    yield made
    for follower in made.followers:
        follower.close()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def knows(follower: EpochFollower, number: int) -> None:
    until(lambda: follower.latest is not None and follower.latest.number >= number)


def test_a_rank_waits_for_an_epoch_that_names_it(rendezvous: Rendezvous) -> None:
    follower = rendezvous.follower(2)
    found: list[RankEpoch | None] = []
    waits = threading.Thread(target=lambda: found.append(follower.next(0)))
    waits.start()
    rendezvous.publish(FIRST, LOSS)
    knows(follower, 2)
    assert not found, "neither names it"
    rendezvous.publish(JOIN)
    waits.join(LIMIT_S)
    assert found == [JOIN]


def test_a_rank_goes_to_the_newest_epoch_and_one_that_is_not_needed_leaves(
    rendezvous: Rendezvous,
) -> None:
    stays, leaves = rendezvous.follower(1), rendezvous.follower(0)
    rendezvous.publish(FIRST, RankEpoch(2, (1,), 1, planned=True, left=(0,)))
    knows(stays, 2)
    knows(leaves, 2)
    found = stays.next(0)
    assert found is not None and found.number == 2
    assert leaves.next(1) is None


def test_a_loss_interrupts_and_a_planned_epoch_waits_for_a_boundary(
    rendezvous: Rendezvous,
) -> None:
    follower, said = rendezvous.follower(1), list[str]()
    rendezvous.publish(FIRST)
    knows(follower, 1)
    follower.interrupt_by(said.append, FIRST)
    rendezvous.publish(RankEpoch(2, (0, 1, 2), 3, planned=True))
    knows(follower, 2)
    assert not said and follower.newer(FIRST)
    rendezvous.publish(RankEpoch(3, (1, 2), 2, why="rank 0 died"))
    until(lambda: said == ["rank 0 died (epoch 3)"])
    follower.interrupt_by(None, FIRST)
    rendezvous.publish(RankEpoch(4, (1,), 1, why="rank 2 died"))
    knows(follower, 4)
    assert len(said) == 1


def test_a_loss_is_not_hidden_by_a_planned_epoch_after_it(rendezvous: Rendezvous) -> None:
    follower, said = rendezvous.follower(1), list[str]()
    rendezvous.publish(FIRST, LOSS, JOIN)
    knows(follower, 3)
    follower.interrupt_by(said.append, FIRST)
    assert said == ["rank 0 died (epoch 2)"]
    follower.interrupt_by(said.append, LOSS)
    assert len(said) == 1, "the loss was before this epoch"


def test_a_rank_that_connects_is_interrupted_by_a_planned_epoch_too(
    rendezvous: Rendezvous,
) -> None:
    """Another member may have seen it while it waited for the rest, and left for it."""
    follower, said = rendezvous.follower(1), list[str]()
    rendezvous.publish(FIRST, LOSS)
    knows(follower, 2)
    follower.interrupt_by(said.append, LOSS, planned=True)
    assert not said
    rendezvous.publish(JOIN)
    until(lambda: len(said) == 1)
    assert "epoch 3" in said[0]


def test_members_wait_for_each_other_and_hear_what_each_holds(rendezvous: Rendezvous) -> None:
    zero, one = rendezvous.follower(0), rendezvous.follower(1)
    rendezvous.publish(FIRST)
    found: list[object] = []
    waits = threading.Thread(target=lambda: found.append(zero.all_here(FIRST, [1, [[1, 4]]])))
    waits.start()
    told = one.all_here(FIRST, [0, []])
    waits.join(LIMIT_S)
    assert told == {0: [1, [[1, 4]]], 1: [0, []]} and found == [told]


def test_who_waits_for_a_member_that_died_goes_on_with_the_next_epoch(
    rendezvous: Rendezvous,
) -> None:
    follower = rendezvous.follower(1)
    rendezvous.publish(FIRST)
    found: list[object] = []
    waits = threading.Thread(target=lambda: found.append(follower.all_here(FIRST, [])))
    waits.start()
    rendezvous.publish(LOSS)
    waits.join(LIMIT_S)
    assert found == [None] and follower.next(1) == LOSS


def test_what_others_have_written_is_refused(rendezvous: Rendezvous) -> None:
    follower = rendezvous.follower(1)
    tell(rendezvous.keys, "good", "value")
    assert follower.read(rendezvous.keys, "good") == "value"
    rendezvous.keys.set("bad", "value")
    with pytest.raises(LaunchError, match="was not written by this run"):
        follower.read(rendezvous.keys, "bad")


def test_a_heartbeat_goes_on(rendezvous: Rendezvous) -> None:
    rendezvous.follower(5)
    until(lambda: rendezvous.keys.check(["beat/5"]))
    first = rendezvous.keys.get("beat/5")
    until(lambda: rendezvous.keys.get("beat/5") != first)
