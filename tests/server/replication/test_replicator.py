"""Replicator, copies and registry where a server hangs, comes back, or is drained."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manyhands.core import Table
from manyhands.server import server_registry
from manyhands.server.network.held_shards import HeldShards
from manyhands.server.network.shard_endpoint import ServerStatus
from manyhands.server.protocol import messages as m
from manyhands.server.protocol import replication_messages as r
from manyhands.server.protocol.frame import Channel
from manyhands.server.replication.copying import Copy
from manyhands.server.replication.replicator import BROKEN, Replicator
from manyhands.server.server_registry import ServerRegistry
from manyhands.server.shard import Shard
from manyhands.server.slots import SlotMap, even

LARGE = np.zeros(1 << 23, np.uint8)  # more than a socket buffers


def nothing(*_: object) -> None:
    pass


def nobody(*_: object) -> Channel:
    raise ConnectionError("there is nobody")


def ends(what: Callable[[], object]) -> None:
    """It does not wait for ever."""
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive(), "it waits for a server that hangs"


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def submit(replicator: Replicator, data: np.ndarray) -> int:
    change = replicator.submit(lambda n: r.ForwardTable(n, 1, b""), lambda: [data], lambda: None)
    return change[0]


class Next:
    """The other end of a connection: it answers a Follow, and reads what a test lets it."""

    def __init__(self) -> None:
        self.mine, self.theirs = pair()
        self.followed = threading.Event()

    def connect(self, server: int, shard: int) -> Channel:
        return self.theirs

    def answer(self) -> None:
        self.mine.receive()
        self.mine.send(m.Done(0))
        self.followed.set()

    def take(self) -> Any:
        head, message = self.mine.receive()
        if head.payload_bytes:
            self.mine.body(bytearray(head.payload_bytes))
        return message


def test_a_chain_without_a_hanging_server_is_taken_while_changes_are_sent_to_it() -> None:
    """`assign` stops the send; it must not wait for what the send holds."""
    after = Next()
    replicator = Replicator(0, 0, after.connect, nothing, nothing)
    replicator.assign(m.ShardChain(1, [0, 1]))
    number = submit(replicator, LARGE)  # kept: the other one has not answered yet
    after.answer()
    while replicator.link is None:  # what it lacks is being sent, and it reads nothing
        threading.Event().wait(0.01)
    ends(lambda: replicator.assign(m.ShardChain(2, [0])))
    ends(lambda: replicator.wait(number))
    ends(lambda: submit(replicator, LARGE))
    replicator.close()


def test_a_learner_that_hangs_at_the_end_of_its_copy_does_not_stop_pushes_for_ever() -> None:
    learner, shard = Next(), Shard(0)
    shard.create(Table("w", length=1 << 21))
    replicator = Replicator(0, 0, learner.connect, nothing, nothing)
    replicator.assign(m.ShardChain(1, [0], learner=1))
    copy = Copy(shard, replicator, 1, learner.theirs, 1, nothing)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            copy.run()
        except BROKEN as e:
            failed.append(e)

    copying = threading.Thread(target=run, daemon=True)
    copying.start()
    learner.answer()
    for _ in range(2):  # two passes without rows; then everything comes, and nobody reads it
        while not isinstance(learner.take(), m.Ping):
            pass
        learner.mine.send(m.Done())
    while not replicator.order.locked():
        threading.Event().wait(0.01)
    ends(lambda: replicator.assign(m.ShardChain(1, [0])))  # the coordinator gave it up
    ends(lambda: submit(replicator, np.zeros(8, np.uint8)))
    copying.join(20.0)
    assert failed and replicator.member.learner is None


@pytest.mark.parametrize("confirms", [False, True])
def test_only_a_learner_that_confirmed_its_copy_is_counted_on(confirms: bool) -> None:
    learner, shard, told = Next(), Shard(0), []
    shard.create(Table("rows", dim=2))
    again = threading.Event()

    def connect(server: int, number: int) -> Channel:
        again.set()
        raise ConnectionError

    replicator = Replicator(0, 0, connect, nothing, nothing)
    replicator.assign(m.ShardChain(1, [0], learner=1))
    copy = Copy(shard, replicator, 1, learner.theirs, 1, lambda *x: told.append(x[1]))

    def run() -> None:
        try:
            copy.run()
        except BROKEN:
            pass

    copying = threading.Thread(target=run, daemon=True)
    copying.start()
    learner.answer()
    while not isinstance(message := learner.take(), r.CopyState):
        if isinstance(message, m.Ping):
            learner.mine.send(m.Done())
    if confirms:
        learner.mine.send(m.Done(message.number))
        copying.join(20.0)
    learner.mine.close()
    copying.join(20.0)
    if confirms:  # the coordinator may have made it a member: it is waited for
        assert told == [1] and replicator.member.learner == 1
        assert again.wait(20.0)
        replicator.assign(m.ShardChain(1, [0]))
    assert told == ([1] if confirms else []) and replicator.member.learner is None
    ends(lambda: replicator.wait(submit(replicator, np.zeros(8, np.uint8))))
    replicator.close()


# -- hosting --


def slots(epoch: int, chain: m.ShardChain) -> SlotMap:
    where = {n: m.ShardAddress("127.0.0.1", 1) for n in (*chain.members, max(0, chain.learner))}
    return SlotMap(epoch, even(1), (where[chain.members[0]],), where, (chain,))


def test_a_server_that_was_given_up_and_comes_back_begins_with_nothing() -> None:
    """It has another number then, and what it has is out of date."""
    hosting = HeldShards(ServerStatus(), (), connect=nobody, tell=nothing, fail=nothing)

    def use(epoch: int, chain: m.ShardChain, you: int) -> None:
        message = slots(epoch, chain).message()
        message.you = you
        hosting.assign(slots(epoch, chain), message)

    use(1, m.ShardChain(1, [0]), 0)
    old = hosting.endpoints[0]
    old.shard.create(Table("rows", dim=2))
    use(4, m.ShardChain(3, [1], learner=2), 2)
    new = hosting.endpoints[0]
    assert new is not old and not new.shard.tables()
    assert new.replicator.teacher == 1 and new.replicator.listens_to(1)
    hosting.close()


def test_an_old_copy_does_not_replace_a_newer_one() -> None:
    hosting = HeldShards(ServerStatus(), (), connect=nobody, tell=nothing, fail=nothing)
    chain = m.ShardChain(1, [0], learner=1)
    message = slots(1, chain).message()
    message.you = 1
    hosting.assign(slots(1, chain), message)
    assert hosting._followed(0, r.Follow(0, 1, 2)) is not None
    newer = hosting.endpoints[0]
    assert hosting._followed(0, r.Follow(0, 1, 1)) is None, "its connection broke long ago"
    assert hosting._followed(0, r.Follow(0, 1, 2)) is None
    assert hosting._followed(0, r.Follow(3, 1, 9)) is None, "another server does not teach it"
    assert hosting.endpoints[0] is newer
    message = slots(2, m.ShardChain(2, [0, 1])).message()
    message.you = 1
    hosting.assign(slots(2, m.ShardChain(2, [0, 1])), message)
    assert hosting._followed(0, r.Follow(0, 2, 3)) is None, "a member is not emptied"
    assert hosting._followed(0, r.Follow(0, 2)) is newer
    hosting.close()


# -- registry --


def registry(count: int, replicas: int) -> tuple[ServerRegistry, list[list[Any]], list[Any]]:
    found = ServerRegistry(count, replicas=replicas)
    found.recovers = True
    sent: list[list[Any]] = [[] for _ in range(count)]
    servers = [
        found.register(m.Register(m.ShardAddress("127.0.0.1", 1000 + i), 1, 50 + i), sent[i].append)
        for i in range(count)
    ]
    return found, sent, servers


def test_a_drained_server_may_leave_also_where_nothing_has_to_be_copied() -> None:
    found, sent, _ = registry(2, 2)
    found.drain(0)
    assert [c.members for c in found.slots.chains] == [[1], [1]]  # type: ignore[union-attr]
    assert isinstance(sent[0][-1], m.Leave)
    assert not isinstance(sent[1][-1], m.Leave) and found.status()["servers"][0]["server"] == 1


def test_a_server_that_is_drained_is_not_chosen_after_a_part() -> None:
    found, _, servers = registry(3, 2)
    found.drain(2)
    for shard, chain in enumerate(found.slots.chains):  # type: ignore[union-attr]
        if 2 not in chain.members:
            found.part(servers[chain.members[0]], shard, chain.members[1])
    for chain in found.slots.chains:  # type: ignore[union-attr]
        assert chain.learner != 2


def test_a_map_that_could_not_be_saved_is_not_used_and_a_loss_is_tried_again() -> None:
    """A full disk, or a claim that was lost: a restart would not know of it."""
    found, _, servers = registry(3, 2)
    before, full = found.slots, [True]

    def save() -> None:
        if full[0]:
            raise ConnectionError("the state was not kept")

    found.changed = save
    with pytest.raises(ConnectionError):
        found.lose(servers[0], "its process ended")
    found.publish()
    assert found.slots is before and not found.losses
    assert sorted(s["server"] for s in found.status()["servers"]) == [0, 1, 2]
    servers[0].send, servers[0].heard = None, 0.0  # it stays away
    found.watch()
    try:
        time.sleep(3 * server_registry.LOOK_S)  # several looks fail, and the thread goes on
        assert not found.losses
        full[0] = False
        until = time.monotonic() + 10
        while not found.losses and time.monotonic() < until:
            time.sleep(0.01)
        assert found.losses == [(0, "it did not come back")]
        assert found.slots is not None
        assert all(0 not in chain.members for chain in found.slots.chains)
    finally:
        found.close()
