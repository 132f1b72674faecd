"""Elastic workers in one process: whoever dies, and between whichever two messages, every sample of
every epoch counts once on every shard."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from manyhands.core import Table
from manyhands.errors import Evicted, PeerLost, StoreError
from manyhands.server.clock import Clock
from manyhands.server.elastic.computed_steps import ComputedSteps
from manyhands.server.elastic.gatherings import START, Gatherings
from manyhands.server.elastic.step_ledger import Lease, StepLedger
from manyhands.server.elastic.step_marks import StepMarks
from manyhands.server.protocol.messages import PushMessage
from manyhands.server.shard import Shard
from manyhands.server.table_updates import TableUpdate

EPOCH = 12  # steps of an epoch; a sync point is at its end
EPOCHS = 3


class Run:
    """A clock, shards and workers, of which each is a generator: it yields after every message, so
    that it can be killed there. A step adds 1 at its own place of the table."""

    def __init__(
        self, seed: int, pending: bool, block: int, staleness: float, size: int | None = None
    ):
        self.chance = random.Random(seed)
        self.size = size or self.chance.randint(1, 4)
        self.shards = [Shard(i) for i in range(3)]
        self.pending, self.block, self.staleness = pending, block, staleness
        self.clock = Clock(self.size)
        self.clock.elastic.used = True
        for shard in self.shards:
            shard.create(Table("v", length=EPOCH * EPOCHS, dtype="float64", optimizer="sum"))
        self.workers: dict[int, Iterator[None]] = {}
        self.syncs: list[list[int]] = [[] for _ in range(self.size)]
        self.kills = self.zombies = 0
        self.late: list[Iterator[None]] = []  # taken for dead, but still at work
        self.finished: set[int] = set()
        self.version = 0

    def start(self, rank: int) -> None:
        self.workers[rank] = self.work(rank)

    def work(self, rank: int) -> Iterator[None]:
        members = self.clock.elastic
        joined = self.clock.join(rank)
        yield
        period, now, sequence, request = 0, joined.clock, 0, 0
        if joined.incarnation:
            while (found := members._note(rank)) is None:
                yield
            period = found[0]
        steps = ComputedSteps()
        while period < EPOCHS:
            request += 1
            while True:
                self.check(rank, joined.incarnation)
                note = str(period).encode()
                limit = (period + 1) * EPOCH
                lease = members.try_lease(rank, limit, steps.done(), note, request)
                yield
                if lease is not None:
                    break
            assert lease is not None
            if lease.sync_at is not None:
                assert lease.sync_at == limit, "steps were left out"
                under_way = [s for held in members.ledger.open().values() for s in held]
                assert min(under_way, default=limit) >= limit, "it came before its steps were done"
                period += 1
                steps.done_below = lease.sync_at
                continue
            mine = [] if lease.step is None else [lease.step]
            again = lease.again
            while len(mine) < self.block and not again and lease.step is not None:
                request += 1
                self.check(rank, joined.incarnation)
                lease = members.try_lease(rank, limit, (), None, request)
                yield
                assert lease is not None, "a worker that holds steps never waits"
                if lease.again:
                    break  # it is pushed alone, in the next block
                mine += [] if lease.step is None else [lease.step]
            carried = [lease.step] if lease.again and not again and lease.step is not None else []
            for block in filter(None, (mine, carried)):
                for step in block:
                    steps.begin(step)
                how = PushMessage(now, pending=self.pending)
                steps.mark(how)
                update = np.zeros(EPOCH * EPOCHS)
                update[block] = 1
                for shard in self.shards:
                    part = TableUpdate("v", None, update.copy())
                    shard.push(rank, joined.incarnation, sequence, [part], how)
                    yield
                sequence += 1
                self.check(rank, joined.incarnation)
                self.clock.post_tick(rank, now, self.staleness, pending=self.pending)
                yield
                while (tick := self.clock.tick_answer(rank)) is None:
                    yield
                    self.check(rank, joined.incarnation)
                now = tick.clock
                yield
                self.commit()
                yield
        self.clock.evict(rank)  # it leaves
        self.finished.add(rank)

    def check(self, rank: int, incarnation: int) -> None:
        """As the coordinator does: a process that was replaced is refused."""
        if self.clock.workers[rank].incarnation != incarnation:
            raise Evicted(f"worker {rank} was replaced")

    def commit(self) -> None:
        for version, ranks in self.clock.commits_since(self.version):
            for shard in self.shards:
                shard.commit(version, ranks)
            self.version = version

    def kill(self, rank: int) -> None:
        """Dead, or only taken for dead: then it goes on until somebody refuses it."""
        worker = self.workers.pop(rank)
        self.kills += 1
        self.clock.evict(rank, "it was killed, says the test")
        self.commit()  # some live worker carries the commits to the shards
        if self.chance.random() < 0.3 and not self.pending:
            self.late.append(worker)
            self.zombies += 1

    def kill_after(self, rank: int, messages: int) -> bool:
        """All workers in turn; one dies after so many messages, and is replaced ten turns later.
        False: it had ended before."""
        for each in range(self.size):
            self.start(each)
        sent, dead_since, turn = 0, -1, 0
        while self.workers:
            turn += 1
            assert turn < 10_000, f"no end: {self.clock.elastic.ledger.open()}"
            for each in sorted(self.workers):
                try:
                    next(self.workers[each], None)
                except PeerLost:
                    assert self.finished
                    self.finished.add(each)
                if each in self.finished:
                    del self.workers[each]
                elif each == rank and dead_since < 0:
                    sent += 1
                    if sent == messages:
                        self.kill(rank)
                        dead_since = turn
            if dead_since == turn - 10:
                self.start(rank)
        self.commit()
        return dead_since >= 0

    def go(self) -> None:
        for rank in range(self.size):
            self.start(rank)
        lost: list[int] = []
        for _ in range(200_000):
            if self.finished >= set(range(self.size)) - set(lost) and not self.workers:
                break
            if lost and self.chance.random() < 0.05:
                self.start(lost.pop())
            knows = self.clock.elastic.running()
            if len(knows) > 1 and len(self.workers) > 1 and self.chance.random() < 0.02:
                rank = self.chance.choice(sorted(self.workers))
                if [r for r in knows if r != rank]:
                    self.kill(rank)
                    lost.append(rank)
            rank = self.chance.choice(sorted(self.workers))
            try:
                next(self.workers[rank], None)
            except PeerLost:  # it joined when the others had done everything
                assert self.finished
                self.finished.add(rank)
            if rank in self.finished:
                self.workers.pop(rank)
            for zombie in self.late[:]:
                if self.chance.random() < 0.2:
                    try:
                        next(zombie)
                    except (Evicted, StoreError, StopIteration):
                        self.late.remove(zombie)
        else:
            raise AssertionError(f"no end: {self.clock.elastic.ledger.open()}")
        self.commit()


@pytest.mark.parametrize("block", [1, 3], ids=["a step a push", "three steps a push"])
@pytest.mark.parametrize("staleness", [0, 2, float("inf")])
def test_every_step_counts_once_on_every_shard_whoever_dies_wherever(
    block: int, staleness: float
) -> None:
    deaths: Counter[str] = Counter()
    for seed in range(70):
        run = Run(seed, False, block, staleness)
        run.go()
        for shard in run.shards:
            assert (shard.dump("v")["values"] == 1).all(), (seed, shard.dump("v")["values"])
        deaths.update(kills=run.kills, zombies=run.zombies)
        deaths["again"] += run.clock.elastic.ledger.leased_again
    assert deaths["kills"] > 30 and deaths["zombies"] > 5 and deaths["again"] > 20, deaths


def test_every_step_counts_once_where_pushes_wait_for_a_commit() -> None:
    again = 0
    for seed in range(100):
        run = Run(seed, True, 1, 0)
        run.go()
        for shard in run.shards:
            assert (shard.dump("v")["values"] == 1).all(), (seed, shard.dump("v")["values"])
        again += run.clock.elastic.ledger.leased_again
    assert again > 20


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("pending", "block"),
    [(False, 1), (False, 2), (True, 1)],
    ids=["at once", "two steps a push", "pending"],
)
def test_a_death_after_any_message_loses_and_doubles_nothing(
    pending: bool, block: int, rank: int
) -> None:
    messages = 0
    while True:
        messages += 1
        run = Run(messages, pending, block, 0 if pending else 1, size=2)
        killed = run.kill_after(rank, messages)
        for shard in run.shards:
            assert (shard.dump("v")["values"] == 1).all(), (messages, shard.dump("v")["values"])
        if not killed:
            break
    assert messages > 50


# -- the parts --


def test_a_sync_point_waits_for_steps_that_others_hold_and_gets_those_of_the_dead() -> None:
    ledger = StepLedger(2)
    assert [ledger.lease(0, 2), ledger.lease(1, 2)] == [Lease(0), Lease(1)]
    assert ledger.lease(0, 2, [0]) is None  # step 1 may come back
    assert ledger.leave(1) == [1]
    assert ledger.lease(0, 2) == Lease(1, again=True)
    assert ledger.lease(0, 2) == Lease(None)  # push first
    assert ledger.lease(0, 2, [1]) == Lease(None, sync_at=2)


def test_a_repeated_request_gets_the_same_step() -> None:
    ledger = StepLedger(1)
    assert ledger.lease(0, 9, request=4) == ledger.lease(0, 9, request=4) == Lease(0)
    assert ledger.lease(0, 9, request=5) == Lease(1)


def test_who_comes_late_to_a_sync_point_is_sent_there() -> None:
    ledger = StepLedger(2)
    ledger.request_sync(0)
    assert ledger.lease(0, 5) == Lease(None, sync_at=0)
    assert ledger.lease(0, 5) == Lease(0)
    assert ledger.lease(1, 5) == Lease(None, sync_at=0)
    assert ledger.lease(1, 5) == Lease(1)


def test_step_marks_refuse_a_sum_of_which_a_part_is_known() -> None:
    marks = StepMarks()
    assert marks.fresh([3, 4], 0)
    marks.add([3])
    assert not marks.fresh([3], 0)
    with pytest.raises(StoreError, match="taken for dead"):
        marks.fresh([3, 4], 0)
    assert not marks.fresh([1, 2], 3), "all below 3 are done"
    assert marks.fresh([4], 3)


def test_step_marks_are_dumped_with_the_table() -> None:
    old, new = Shard(), Shard()
    table = Table("v", length=1, dtype="float64", optimizer="sum")
    for shard in (old, new):
        shard.create(table)
    push = lambda shard, rank: shard.push(
        rank, 0, 0, [TableUpdate("v", None, np.ones(1))], PushMessage(steps=[7])
    )
    assert push(old, 0)
    new.load("v", old.dump("v"))
    assert not push(new, 1) and new.dump("v")["values"] == 1


def test_a_gathering_is_complete_when_all_that_live_have_come() -> None:
    meet = Gatherings(3)
    meet.bring(0, (START, 0), b"a")
    assert meet.answer((START, 0), [0, 1, 2]) is None
    meet.bring(2, (START, 0), b"c")
    assert meet.absent((START, 0), [0, 1, 2]) == [1]
    assert meet.answer((START, 0), [0, 2]) == {0: b"a", 2: b"c"}  # 1 died
    assert meet.answer((START, 0), [2]) == {0: b"a", 2: b"c"}, "an answer is fixed"
    meet.join(1, 4)
    meet.bring(0, (3, 0), b"x")
    assert meet.answer((3, 0), [0, 1]) == {0: b"x"}, "it joined after that sync point"
    meet.bring(0, (4, 0), b"y")
    assert meet.answer((4, 0), [0, 1]) is None
