"""Clock: bounded staleness, quorums, delays, evicted and paused workers.

Also step claims and sync points.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator

import pytest

from manyhands.core import Tick
from manyhands.errors import PeerLost, StoreError
from manyhands.server.clock import Clock

INF = math.inf


class Workers:
    """Drives a clock by hand: who computes ends its clock when `finish` says so, and waits until
    the clock lets it go on.
    """

    def __init__(self, size: int, **words: object):
        self.clock, self.words = Clock(size), words
        self.at = [0] * size  # the clock each is in
        self.done = [0] * size
        self.waits = [False] * size
        self.counted = [0] * size
        self.gone: set[int] = set()

    def finish(self, worker: int) -> None:
        self.clock.post_tick(worker, self.at[worker], **self.words)  # type: ignore[arg-type]
        self.done[worker] += 1
        self.waits[worker] = True
        self.poll()

    def poll(self) -> None:
        for worker in self.waiting():
            if (tick := self.clock.tick_answer(worker)) is not None:
                self.waits[worker] = False
                self.at[worker] = tick.clock
                self.counted[worker] += tick.counted

    def evict(self, worker: int) -> None:
        self.gone.add(worker)
        self.clock.evict(worker)
        self.poll()

    def waiting(self) -> list[int]:
        return [w for w, waits in enumerate(self.waits) if waits and w not in self.gone]

    def running(self) -> list[int]:
        return [w for w, waits in enumerate(self.waits) if not waits and w not in self.gone]


# -- bounded staleness --


@pytest.mark.parametrize("staleness", [0, 1, 3, INF])
def test_no_schedule_lets_a_worker_run_further_ahead_than_the_bound(staleness: float) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        workers, waits = Workers(chance.randint(1, 5), staleness=staleness), 0
        for _ in range(80):
            workers.finish(chance.choice(workers.running()))
            slowest = min(workers.done)
            for w in workers.running():
                assert workers.done[w] - slowest <= staleness
            for w in workers.waiting():
                assert workers.done[w] - slowest > staleness, "kept waiting without need"
            assert max(workers.done) - slowest <= staleness + 1
            waits += len(workers.waiting())
        assert waits == 0 if staleness == INF or len(workers.done) == 1 else waits > 0


def test_staleness_0_is_lockstep() -> None:
    for seed in range(50):
        chance, workers = random.Random(seed), Workers(4, staleness=0)
        for step in range(20):
            assert workers.running() == [0, 1, 2, 3] and workers.at == [step] * 4
            for w in chance.sample(range(4), 4):
                workers.finish(w)


def test_the_bound_holds_while_workers_die() -> None:
    for seed in range(100):
        chance, workers = random.Random(seed), Workers(6, staleness=2)
        for _ in range(100):
            assert workers.running(), "the slowest is always let on"
            if len(workers.gone) < 5 and chance.random() < 0.05:
                workers.evict(chance.choice([w for w in range(6) if w not in workers.gone]))
                continue
            workers.finish(chance.choice(workers.running()))
            slowest = min(workers.done[w] for w in range(6) if w not in workers.gone)
            assert all(workers.done[w] - slowest <= 2 for w in workers.running())


def test_the_answer_says_which_clock_begins_and_asking_again_changes_nothing() -> None:
    clock = Clock(2)
    clock.post_tick(0, 0, 0)
    clock.post_tick(0, 0, 0)  # its first request was lost on the way back
    assert clock.tick_answer(0) is None and clock.behind(0) == [1]
    clock.post_tick(1, 0, 0)
    for _ in range(2):
        assert clock.tick_answer(0) == Tick(1) and clock.tick_answer(1) == Tick(1)
        clock.post_tick(0, 0, 0)
    clock.post_tick(1, 1, 0)
    assert clock.tick_answer(1) is None, "the repeated ticks of 0 did not count"
    with pytest.raises(StoreError, match="worker 0 has done clock 7, but it is in clock 1"):
        clock.post_tick(0, 7, 0)
    with pytest.raises(StoreError, match="worker 1 has done clock 2, but it is in clock 1"):
        clock.post_tick(1, 2, 0)


# -- quorums --


@pytest.mark.parametrize("quorum", [1, 2, 3, 4, None])
def test_the_first_k_are_committed_and_what_comes_late_never_counts(quorum: int | None) -> None:
    needed = quorum or 4
    for seed in range(60):
        chance = random.Random(seed)
        workers = Workers(4, quorum=quorum, pending=True)
        began, came, dropped = [0] * 4, set[int](), 0
        for _ in range(80):
            w = chance.choice(workers.running())
            late, before = began[w] < workers.clock.version, workers.counted[w]
            workers.finish(w)
            if late:
                dropped += 1
                assert w in workers.running() and workers.counted[w] == before, "told at once"
                assert workers.at[w] == workers.clock.version, "and goes on where the others are"
                began[w] = workers.clock.version
                continue
            came.add(w)
            if len(came) < needed:
                assert workers.clock.version == len(workers.clock.commits_since(0))
                assert set(workers.waiting()) == came
            else:
                version, members = workers.clock.commits_since(0)[-1]
                assert version == workers.clock.version
                assert members == [(m, version - 1) for m in sorted(came)], (
                    "rank order, all of this clock"
                )
                for m in came:
                    began[m] = version
                came.clear()
                assert not workers.waiting()
        assert workers.clock.stats()["late_dropped"] == dropped
        assert (dropped > 0) == (needed < 4)


def test_the_divisor_is_the_number_that_was_committed() -> None:
    workers = Workers(4, quorum=3, pending=True)
    for w in (3, 0, 1):
        workers.finish(w)
    assert workers.clock.commits_since(0) == [(1, [(0, 0), (1, 0), (3, 0)])]
    workers.finish(2)
    assert workers.counted == [1, 1, 0, 1] and workers.at == [1, 1, 1, 1]
    assert workers.clock.commits_since(1) == [] and len(workers.clock.commits_since(0)) == 1


def test_a_tick_with_a_quorum_takes_part_also_without_a_push() -> None:
    clock = Clock(2)
    clock.post_tick(0, 0, quorum=2, pending=False)  # its share of the batch was empty
    clock.post_tick(1, 0, quorum=2, pending=True)
    assert clock.tick_answer(0) == clock.tick_answer(1) == Tick(1)


def test_one_that_waits_without_a_pending_push_does_not_stop_those_who_have() -> None:
    clock = Clock(3)
    clock.post_tick(0, 0, 0, pending=True)
    clock.post_tick(1, 0, 0, pending=False)
    assert clock.commits_since(0) == [] and clock.tick_answer(1) is None, (
        "2 may still hold something"
    )
    clock.post_tick(2, 0, 0, pending=True)
    assert clock.commits_since(0) == [(1, [(0, 0), (2, 0)])]
    assert clock.tick_answer(1) == Tick(1)


def test_commits_are_remembered_in_order() -> None:
    workers = Workers(2, pending=True)
    for _ in range(5):
        workers.finish(1)
        workers.finish(0)
    assert [version for version, _ in workers.clock.commits_since(2)] == [3, 4, 5]
    assert workers.clock.commits_since(5) == workers.clock.commits_since(9) == []


# -- asynchronous ADMM: partial barrier, maximum delay, nobody is dropped --


@pytest.mark.parametrize(("quorum", "delay"), [(1, 1), (1, 3), (2, 2), (2, 5), (4, 1)])
def test_with_keep_every_report_counts_and_none_stays_away_longer_than_the_delay(
    quorum: int, delay: int
) -> None:
    for seed in range(40):
        chance, workers = (
            random.Random(seed),
            Workers(4, quorum=quorum, late="keep", delay=delay, pending=True),
        )
        speed = [chance.choice((1, 1, 10)) for _ in range(4)]
        for _ in range(100):
            able = workers.running()
            workers.finish(chance.choices(able, [speed[w] for w in able])[0])
        commits = workers.clock.commits_since(0)
        assert len(commits) > 3
        for _, members in commits:
            assert len(members) >= quorum
        for w in range(4):
            away, clocks = 0, []
            for _, members in commits:
                mine = [clock for m, clock in members if m == w]
                clocks += mine
                away = 0 if mine else away + 1
                assert away < delay
            assert clocks == sorted(set(clocks)), "each of its clocks once"
            assert workers.counted[w] == len(clocks) == workers.done[w] - (w in workers.waiting())


def test_a_report_that_waits_is_in_the_next_commit() -> None:
    clock = Clock(3)
    for w in (0, 1):
        clock.post_tick(w, 0, quorum=2, late="keep", pending=True)
    assert clock.commits_since(0) == [(1, [(0, 0), (1, 0)])]
    clock.post_tick(2, 0, quorum=2, late="keep", pending=True)
    assert clock.tick_answer(2) is None
    clock.post_tick(1, 1, quorum=2, late="keep", pending=True)
    assert clock.commits_since(1) == [(2, [(1, 1), (2, 0)])]
    assert clock.tick_answer(2) == Tick(2)


# -- the dead --


def test_an_evicted_worker_shrinks_the_quorum_and_wakes_who_waits_for_it() -> None:
    workers = Workers(3, pending=True)
    workers.finish(0)
    workers.finish(2)
    assert workers.waiting() == [0, 2] and workers.clock.behind(0) == [1]
    workers.evict(1)
    assert workers.running() == [0, 2]
    assert workers.clock.commits_since(0) == [(1, [(0, 0), (2, 0)])]
    with pytest.raises(StoreError, match="worker 1 was evicted"):
        workers.clock.post_tick(1, 0, pending=True)
    assert workers.clock.alive() == [0, 2]


def test_what_an_evicted_worker_had_reported_does_not_count() -> None:
    workers = Workers(3, pending=True)
    workers.finish(1)
    workers.evict(1)
    workers.finish(0)
    workers.finish(2)
    assert workers.clock.commits_since(0) == [(1, [(0, 0), (2, 0)])]


def test_eviction_wakes_a_thread_that_waits() -> None:
    clock, answers = Clock(2), []
    thread = threading.Thread(target=lambda: answers.append(clock.tick(0, 0, 0, timeout_s=60)))
    thread.start()
    clock.evict(1)
    thread.join(60)
    assert answers == [Tick(1)]


def test_an_evicted_worker_that_waits_hears_so() -> None:
    clock, said = Clock(2), []

    def wait() -> None:
        try:
            clock.tick(0, 0, 0, timeout_s=60)
        except StoreError as e:
            said.append(str(e))

    thread = threading.Thread(target=wait)
    thread.start()
    clock.evict(0)
    thread.join(60)
    assert said and "worker 0 was evicted" in said[0]


def test_a_timeout_names_who_is_behind() -> None:
    clock = Clock(4)
    clock.post_tick(2, 0, 0)
    with pytest.raises(
        PeerLost, match=r"worker 1 has done clock 0 and waited 0.01 s for workers \[0, 3\]"
    ) as e:
        clock.tick(1, 0, 0, timeout_s=0.01)
    assert e.value.ranks == (0, 3)
    clock = Clock(3)
    with pytest.raises(PeerLost, match=r"workers \[1, 2\]"):
        clock.tick(0, 0, pending=True, timeout_s=0.01)
    for w in (1, 2):
        clock.post_tick(w, 0, pending=True)
    assert clock.tick(0, 0, pending=True, timeout_s=0) == Tick(1), "it may ask again"


def test_a_new_incarnation_takes_the_place_of_the_dead_at_the_slowest_clock() -> None:
    workers = Workers(3, staleness=1)
    assert workers.clock.join(1) == (0, 0, 0) and workers.clock.join(1, 0) == (0, 0, 0)
    workers.evict(1)
    for _ in range(5):
        workers.finish(0)
        workers.finish(2)
    with pytest.raises(StoreError, match="incarnation 0 was evicted"):
        workers.clock.join(1, 0)
    incarnation, clock, _ = workers.clock.join(1)
    assert (incarnation, clock) == (1, 1), "not a clock that the dead one was in"
    workers.gone.clear()
    workers.at[1], workers.done[1] = clock, 5
    workers.finish(0)
    assert 0 in workers.running(), "one ahead of the new one"
    workers.finish(0)
    assert workers.waiting() == [0]
    workers.finish(1)
    workers.finish(2)
    assert workers.waiting() == []
    with pytest.raises(
        StoreError, match="joins as incarnation 0, but incarnation 1 took its place"
    ):
        workers.clock.join(1, 0)


def test_who_enters_late_is_not_late() -> None:
    clock = Clock(3)
    for w in (0, 1):
        clock.post_tick(w, 0, quorum=2, pending=True)
    assert clock.join(2) == (0, 1, 1), "it pulls what one commit made"
    clock.post_tick(2, 1, quorum=1, pending=True)
    assert clock.tick_answer(2) == Tick(2)


# -- step claims and sync points --


def rounds(
    clock: Clock, size: int, limit: int, shared: bool, chance: random.Random, call: float
) -> Iterator[dict[int, list[int]]]:
    """The steps that each worker claimed between two sync points, under a random schedule."""
    while True:
        claimed: dict[int, list[int]] = {w: [] for w in range(size)}
        at_work = set(range(size))
        while at_work:
            if chance.random() < call:
                clock.request_sync(chance.choice(sorted(at_work)))
            w = chance.choice(sorted(at_work))
            number = clock.claim(w, limit, shared)
            if number is None:
                at_work.remove(w)
            else:
                claimed[w].append(number)
        yield claimed
        if clock.unclaimed() >= limit:
            return


@pytest.mark.parametrize("call", [0.0, 0.05, 0.5])
def test_a_shared_count_gives_every_number_to_one_worker(call: float) -> None:
    sync_points = 0
    for seed in range(60):
        chance, clock, stands = random.Random(seed), Clock(3), 0
        for claimed in rounds(clock, 3, 50, True, chance, call):
            numbers = sorted(n for some in claimed.values() for n in some)
            assert numbers == list(range(stands, clock.unclaimed())), "each once, none is left out"
            stands, sync_points = clock.unclaimed(), sync_points + 1
        assert stands == 50
    assert (sync_points == 60) == (call == 0)


@pytest.mark.parametrize("call", [0.0, 0.05, 0.5])
def test_own_counts_give_every_number_to_every_worker_and_all_stop_at_the_same(call: float) -> None:
    for seed in range(60):
        chance, clock, stands = random.Random(seed), Clock(3), 0
        for claimed in rounds(clock, 3, 50, False, chance, call):
            for some in claimed.values():
                assert some == list(range(stands, clock.unclaimed()))
            stands = clock.unclaimed()
        assert stands == 50


@pytest.mark.parametrize("shared", [True, False])
def test_a_request_of_one_sync_point_does_not_end_the_next_period(shared: bool) -> None:
    clock = Clock(2)
    assert clock.claim(0, 100, shared) == 0
    clock.request_sync(0)
    clock.request_sync(0)
    if not shared:
        assert clock.claim(1, 100, shared) == 0, "up to where 0 is"
    assert clock.claim(1, 100, shared) is None
    clock.request_sync(0)  # it does not know yet that 1 rests already
    assert clock.claim(0, 100, shared) is None
    assert [clock.claim(0, 100, shared) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("shared", [True, False])
def test_a_request_while_all_wait_asks_for_another_sync_point_at_the_same_number(
    shared: bool,
) -> None:
    clock = Clock(2)
    for w in (0, 1):
        while clock.claim(w, 3, shared) is not None:
            pass
    clock.request_sync(1)
    assert [clock.claim(w, 9, shared) for w in (0, 1)] == [None, None]
    assert clock.unclaimed() == 3
    assert clock.claim(1, 9, shared) == 3


def test_a_request_before_any_claim_syncs_at_once() -> None:
    clock = Clock(2)
    clock.request_sync(0)
    assert clock.claim(1, 5, False) is None and clock.claim(0, 5, False) is None
    assert clock.claim(0, 5, False) == 0


def test_a_claim_asked_again_gives_the_same_number() -> None:
    clock = Clock(2)
    assert clock.claim(0, 5, True, request=1) == clock.claim(0, 5, True, request=1) == 0
    assert clock.claim(1, 5, True, request=1) == 1
    assert clock.claim(0, 2, True, request=2) is clock.claim(0, 2, True, request=2) is None
    assert clock.claim(1, 2, True, request=2) is None
    assert clock.claim(0, 5, True, request=3) == 2, "one None was given, not two"


def test_after_a_sync_point_counting_may_change_its_kind() -> None:
    clock = Clock(2)
    for w in (0, 1, 0, 1, 0):
        clock.claim(w, 4, True)
    assert clock.claim(1, 4, True) is None
    assert [clock.claim(w, 6, False) for w in (0, 1, 0, 1)] == [4, 4, 5, 5]


def test_one_that_syncs_is_not_waited_for_until_the_sync_point_is_over() -> None:
    workers = Workers(2, staleness=0)
    clock = workers.clock
    assert clock.claim(0, 1, True) == 0
    assert clock.claim(1, 1, True) is None
    workers.finish(0)
    assert 0 in workers.running(), "1 rests"
    assert clock.claim(0, 1, True) is None
    assert clock.claim(0, 9, True) == 1
    workers.finish(0)
    assert workers.waiting() == [0], "the sync point is over for both, though 1 has not claimed yet"
    assert clock.claim(1, 9, True) == 2
    workers.finish(1)
    assert workers.waiting() == []


def test_syncing_moves_quorums_on() -> None:
    workers = Workers(3, pending=True)
    for w in range(3):
        assert workers.clock.claim(w, 3, True) == w
    workers.finish(0)
    workers.finish(1)
    assert workers.waiting() == [0, 1]
    assert workers.clock.claim(2, 3, True) is None  # it brings nothing for its last number
    workers.poll()
    assert workers.clock.commits_since(0) == [(1, [(0, 0), (1, 0)])]


def test_a_worker_ahead_at_the_sync_point_is_not_held_back_after_it() -> None:
    workers = Workers(2, staleness=5)
    clock = workers.clock
    for _ in range(5):
        clock.claim(0, 6, True)
        workers.finish(0)
    clock.claim(1, 6, True)
    workers.finish(1)
    assert clock.claim(0, 6, True) is clock.claim(1, 6, True) is None
    workers.words["staleness"] = 0
    for _ in range(3):
        for w in (0, 1):
            assert clock.claim(w, 20, True) is not None
            workers.finish(w)
        assert workers.waiting() == [], "they began the period on one line"
    assert clock.claim(0, 20, True) is not None


def test_one_that_was_left_behind_by_a_quorum_goes_on_where_the_others_are() -> None:
    workers = Workers(2, quorum=1, pending=True)
    numbers: dict[int, list[int | None]] = {0: [], 1: [workers.clock.claim(1, 100, False)]}
    for _ in range(10):
        numbers[0].append(workers.clock.claim(0, 100, False))
        workers.finish(0)
    workers.finish(1)
    assert workers.counted[1] == 0 and workers.at[1] == 10
    numbers[1].append(workers.clock.claim(1, 100, False))
    assert numbers == {0: list(range(10)), 1: [0, 10]}, (
        "steps that others made without it are not made again"
    )
    workers.clock.request_sync(0)
    workers.finish(1)
    assert workers.clock.claim(1, 100, False) is None
    assert workers.clock.claim(0, 100, False) == 10, "up to where 1 is"
    assert workers.clock.claim(0, 100, False) is None


def test_a_dead_worker_does_not_keep_others_from_syncing() -> None:
    clock = Clock(3)
    for _ in range(4):
        clock.claim(2, 100, False)
    clock.claim(0, 100, False)
    clock.evict(2)
    clock.request_sync(0)
    assert clock.claim(0, 100, False) is None, "the dead one's number 3 is nobody's goal"
    assert clock.claim(1, 100, False) == 0 and clock.claim(1, 100, False) is None


# -- the rest --


def test_tables_are_waited_for() -> None:
    clock = Clock(2)
    with pytest.raises(PeerLost, match=r"waited 0\.01 s for rank 0 to create table 'w'") as e:
        clock.wait_for_table("w", 0.01)
    assert e.value.ranks == (0,)
    clock.table_created("w")
    clock.wait_for_table("w", 0)
    assert clock.has_table("w") and not clock.has_table("v")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"staleness": -1}, "staleness=-1; 0"),
        ({"staleness": math.nan}, "staleness=nan"),
        ({"quorum": 0}, "quorum=0, but there are 2 workers"),
        ({"quorum": 3}, "quorum=3, but there are 2 workers; 1 to 2 is needed"),
        ({"quorum": 1, "late": "lose"}, "late='lose'"),
        ({"delay": 0}, "delay=0; at least 1"),
        ({"staleness": 2, "pending": True}, "staleness=2 with pending pushes"),
    ],
)
def test_what_a_tick_cannot_mean_is_refused(words: dict[str, object], says: str) -> None:
    clock = Clock(2)
    with pytest.raises(StoreError, match=says):
        clock.post_tick(0, 0, **words)  # type: ignore[arg-type]
    clock.post_tick(0, 0, 0)
    assert clock.behind(0) == [1], "the refused tick was none"


def test_unknown_workers_are_refused() -> None:
    with pytest.raises(StoreError, match="worker 2, but workers are 0 to 1"):
        Clock(2).join(2)
    with pytest.raises(StoreError, match="a clock for 0 workers"):
        Clock(0)
    with pytest.raises(StoreError, match="worker 0 has not ticked"):
        Clock(1).tick_answer(0)
