"""Roster of an elastic run: who is lost, who joins, and which epochs follow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.launch.elastic.roster import Roster
from manyhands.membership.rank_epochs import RankEpoch


def roster(
    data: int, inner: int = 1, least: int = 1, most: int = 4, spares: int = 0
) -> tuple[Roster, RankEpoch]:
    """A run under way with all of its ranks."""
    made = Roster(least, most, data, inner, spares)
    for seat in made.missing():
        made.add(seat)
    for member in list(made.starting):
        made.ready(member)
    epoch = made.decide(loss=False)
    assert epoch is not None
    return made, epoch


def replaced(made: Roster) -> list[int]:
    """Members that were started for all missing seats, and are ready."""
    members = [made.add(seat) for seat in made.missing()]
    for member in members:
        made.ready(member)
    return members


# -- the first epoch --


def test_a_run_begins_when_all_of_its_ranks_are_ready() -> None:
    made = Roster(1, 4, 3)
    members = [made.add(seat) for seat in made.missing()]
    assert made.missing() == []
    for member in members:
        assert made.decide(loss=False) is None
        made.ready(member)
    assert made.decide(loss=False) == RankEpoch(1, (0, 1, 2), 3, planned=True)
    assert made.decide(loss=False) is None, "an epoch is decided once"


def test_one_that_dies_before_the_first_epoch_is_replaced_before_it() -> None:
    made = Roster(1, 4, 2)
    for seat in made.missing():
        made.add(seat)
    made.ready(0)
    assert made.lost(1, "killed") == 1
    assert made.decide(loss=False) is None and made.missing() == [1]
    replaced(made)
    assert made.decide(loss=False) == RankEpoch(1, (0, 2), 2, planned=True)


def test_a_first_epoch_does_without_seats_that_were_given_up() -> None:
    made = Roster(1, 4, 2)
    for seat in made.missing():
        made.add(seat)
    made.ready(0)
    made.lost(1, "killed")
    made.given_up.add(1)
    epoch = made.decide(loss=False)
    assert epoch is not None and epoch.members == (0,) and epoch.data == 1


# -- losses --


def test_the_others_go_on_without_one_that_is_lost() -> None:
    made, _ = roster(3)
    assert made.lost(1, "rank 1 died") == 1
    assert made.decide(loss=True) == RankEpoch(2, (0, 2), 2, why="rank 1 died")


def test_several_deaths_at_once_make_one_epoch() -> None:
    made, _ = roster(4)
    for member in (0, 3):
        made.lost(member, f"rank {member} died")
    epoch = made.decide(loss=True)
    assert epoch is not None and (epoch.number, epoch.members) == (2, (1, 2))
    assert made.missing() == [0, 3]


def test_with_fewer_than_the_least_there_is_no_epoch_until_others_come_or_it_is_over() -> None:
    made, _ = roster(3, least=2)
    for member in (0, 1):
        made.lost(member, "died")
    assert made.decide(loss=True) is None
    assert replaced(made) == [3, 4]
    epoch = made.decide(loss=True)
    assert epoch is not None and epoch.members == (3, 4, 2) and not epoch.planned

    made, _ = roster(3, least=2)
    for member in (0, 1):
        made.lost(member, "died")
    assert made.decide(loss=True) is None
    last = made.decide(loss=True, over=True)
    assert last is not None and last.last and last.members == (2,) and not last.planned


def test_where_all_are_lost_there_is_no_epoch_even_when_it_is_over() -> None:
    made, _ = roster(2)
    for member in (0, 1):
        made.lost(member, "died")
    assert made.decide(loss=True) is None and made.decide(loss=True, over=True) is None
    assert made.members() == [] and made.missing() == [0, 1]


def test_the_death_of_one_without_a_rank_is_no_reason() -> None:
    made, _ = roster(2, spares=1)
    made.lost(2, "the spare died")
    assert made.why == "" and made.decide(loss=False) is None
    assert made.missing() == [None]


# -- joins --


def test_a_replacement_joins_at_a_planned_epoch() -> None:
    made, _ = roster(3)
    made.lost(0, "died")
    made.decide(loss=True)
    made.why = ""  # the launcher has published it
    assert replaced(made) == [3]
    assert made.decide(loss=False) == RankEpoch(3, (3, 1, 2), 3, planned=True)


def test_one_that_joins_while_another_dies_joins_at_once() -> None:
    made, _ = roster(3)
    made.lost(0, "died")
    made.decide(loss=True)
    replaced(made)
    made.lost(2, "died too")
    epoch = made.decide(loss=True)
    assert epoch is not None and epoch.members == (3, 1) and not epoch.planned


def test_a_seat_that_was_taken_meanwhile_leaves_a_replacement_free() -> None:
    made, _ = roster(2, spares=1)
    made.lost(0, "died")
    slow = made.add(0)
    made.decide(loss=True)  # the spare takes the seat
    made.ready(slow)
    assert made.free == [slow] and made.decide(loss=False) is None
    assert made.missing() == []


# -- spares --


def test_a_spare_takes_the_seat_in_the_epoch_of_the_loss() -> None:
    made, epoch = roster(3, spares=1)
    assert epoch.members == (0, 1, 2) and made.free == [3]
    made.lost(1, "died")
    assert made.missing() == [None], "the spare takes the seat; another spare is missing"
    assert made.decide(loss=True) == RankEpoch(2, (0, 3, 2), 3, why="died")
    assert made.free == [] and made.missing() == [None]


def test_a_spare_on_its_way_counts_for_a_seat() -> None:
    made = Roster(1, 4, 1, 1, 1)
    first, spare = (made.add(seat) for seat in made.missing())
    made.ready(first)
    made.decide(loss=False)
    made.lost(first, "died")
    assert made.missing() == [None], "the spare on its way takes the seat"
    made.ready(spare)
    epoch = made.decide(loss=True)
    assert epoch is not None and epoch.members == (spare,)


# -- replicas of several ranks --


def test_ranks_of_an_incomplete_replica_wait_for_its_replacement() -> None:
    made, _ = roster(2, inner=2)
    made.lost(2, "died")
    epoch = made.decide(loss=True)
    assert epoch is not None and epoch.members == (0, 1) and epoch.data == 1
    assert made.missing() == [2] and 3 in made.members()
    replaced(made)
    epoch = made.decide(loss=False)
    assert epoch is not None and epoch.members == (0, 1, 4, 3) and epoch.planned


def test_members_of_incomplete_replicas_fill_others() -> None:
    made, _ = roster(2, inner=2)
    made.lost(0, "died")
    made.lost(3, "died")
    epoch = made.decide(loss=True)
    assert epoch is not None and epoch.members == (2, 1) and epoch.data == 1
    assert made.missing() == [2, 3]


def test_a_death_in_an_incomplete_replica_changes_no_epoch() -> None:
    made, _ = roster(2, inner=2)
    made.lost(2, "died")
    made.decide(loss=True)
    made.why = ""
    made.lost(3, "died too")
    assert made.why == "" and made.decide(loss=False) is None and made.missing() == [2, 3]


# -- scale --


def test_a_run_grows_at_a_planned_epoch() -> None:
    made, _ = roster(2)
    made.scale(4)
    assert made.missing() == [2, 3]
    replaced(made)
    assert made.decide(loss=False) == RankEpoch(2, (0, 1, 2, 3), 4, planned=True)


def test_a_run_shrinks_at_a_planned_epoch_and_says_who_leaves() -> None:
    made, _ = roster(4)
    made.scale(2)
    assert made.decide(loss=False) == RankEpoch(2, (0, 1), 2, planned=True, left=(2, 3))
    assert made.missing() == [] and made.members() == [0, 1]


def test_one_on_its_way_to_a_seat_that_is_gone_takes_another_or_waits() -> None:
    made, _ = roster(3)
    made.lost(2, "died")
    made.decide(loss=True)
    late = made.add(2)
    made.scale(2)
    made.ready(late)
    assert made.decide(loss=False) is None and made.free == [late]
    made.lost(0, "died")
    epoch = made.decide(loss=True)
    assert epoch is not None and epoch.members == (late, 1)


def test_seats_that_were_given_up_are_tried_again_after_a_change_of_scale() -> None:
    made, _ = roster(2)
    made.lost(1, "died")
    made.given_up.add(1)
    assert made.missing() == []
    made.scale(2)
    assert made.missing() == [1]


# -- any order of events --

EVENTS = ("start", "ready", "ready", "lose", "lose two", "scale", "give up", "look", "look", "over")


class Walk:
    """A roster under random events, held against what must be true after each."""

    def __init__(self, data: int, inner: int, least: int, spares: int):
        self.roster = Roster(least, 4, data, inner, spares)
        self.dead: set[int] = set()
        self.gone: set[int] = set()
        self.loss = False
        self.numbers = [0]

    def do(self, event: str, pick: int) -> None:
        made = self.roster
        living = made.members()
        if event == "start":
            for seat in made.missing():
                made.add(seat)
        elif event == "ready" and made.starting:
            made.ready(sorted(made.starting)[pick % len(made.starting)])
        elif event.startswith("lose"):
            for at in range(1 + event.endswith("two")):
                if len(living) > at:
                    self.lose(living[(pick + at) % len(living)])
        elif event == "scale":
            made.scale(max(made.least, 1 + pick % 4))
        elif event == "give up" and made.missing():
            made.given_up |= {s for s in made.missing()[:1] if s is not None}
        elif event in ("look", "over"):
            self.look(event == "over" and self.loss)

    def lose(self, member: int) -> None:
        epoch = self.roster.epoch
        self.loss = self.loss or (epoch is not None and member in epoch.members)
        self.roster.lost(member, f"member {member} died")
        self.dead.add(member)

    def look(self, over: bool) -> None:
        made, before = self.roster, self.roster.epoch
        epoch = made.decide(self.loss, over)
        if epoch is None:
            if self.loss:
                assert made.replicas() < made.least or not made.replicas()
            return
        assert epoch.number > self.numbers[-1]
        assert not set(epoch.members) & self.dead, "an epoch never names a dead member"
        assert not set(epoch.members) & set(epoch.left)
        assert len(epoch.members) == len(set(epoch.members)) == epoch.data * made.inner
        assert epoch.last == over and (over or made.least <= epoch.data)
        assert epoch.data <= made.want
        assert epoch.planned == (not self.loss and not over)
        if epoch.planned and before is not None:
            assert epoch.members != before.members
            assert not set(before.members) & self.dead
        self.numbers.append(epoch.number)
        self.loss, made.why = False, ""

    def check(self) -> None:
        made = self.roster
        living = made.members()
        assert len(living) == len(set(living)), "each is in one place"
        assert not set(living) & (self.dead | made.left)
        assert not [s for s in made.missing() if s in made.seated]
        assert all(s < made.want * made.inner for s in made.seated)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 100)), max_size=40),
)
def test_in_any_order_of_events_epochs_name_the_living_and_their_numbers_increase(
    data: int, inner: int, least: int, spares: int, events: list[tuple[str, int]]
) -> None:
    walk = Walk(max(data, least), inner, least, spares)
    for event, pick in events:
        walk.do(event, pick)
        walk.check()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 100)), max_size=30),
)
def test_whatever_happened_a_run_whose_processes_start_again_has_all_its_replicas(
    data: int, inner: int, events: list[tuple[str, int]]
) -> None:
    walk = Walk(data, inner, 1, 0)
    for event, pick in events:
        walk.do(event, pick)
    made = walk.roster
    made.given_up.clear()
    replaced(made)
    for member in list(made.starting):
        made.ready(member)
    walk.look(over=False)
    assert made.epoch is not None and made.epoch.data == made.want and made.missing() == []
