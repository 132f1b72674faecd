"""Kept rounds: two boundaries in memory, of which ranks that are left always have one in common."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from manyhands.core import Tensors
from manyhands.recover import kept_rounds
from manyhands.recover.kept_rounds import Boundary, Held, KeptRounds, KeptState, choose


def tensors(value: float, size: int = 3) -> Tensors:
    return {"model/w": torch.full((size,), value), "rng/cpu": torch.tensor([int(value)])}


def kept(*rounds: int, epoch: int = 1) -> KeptRounds:
    found = KeptRounds(active=epoch)
    for round in rounds:
        found.keep((epoch, round), tensors(float(round)), {"round": round})
    return found


def held_of(active: int, own: list[Any], copies: list[Any] | None = None, part: int = 0) -> Held:
    """As a rank says it: its own boundaries, and copies of those of part 1."""
    return [active, [[part, own]] if own else [], [[1, copies]] if copies else []]


def common_boundary(held: list[Held]) -> Boundary | None:
    found = choose(held, 1)
    trained = any(own for _, own, _ in held)
    assert found is not None or not trained, "no boundary in common"
    return None if found is None else found.boundary


# -- the buffers --


def test_a_boundary_holds_copies_that_training_does_not_change() -> None:
    found, here = KeptRounds(), tensors(1.0)
    found.keep((1, 5), here, {"position": [0, 1, 2]})
    here["model/w"].fill_(7.0)
    state = found.states[1, 5]
    assert torch.equal(state.tensors["model/w"], torch.ones(3))
    assert state.round == 5 and state.meta == {"position": [0, 1, 2]}
    assert state.nbytes == 3 * 4 + 8


def test_tensors_are_found_by_kind() -> None:
    state = KeptState(0, {"model/a/b": torch.ones(1), "modelled/c": torch.ones(1)}, {})
    assert state.of_kind("model").keys() == {"a/b"}
    assert state.of_kind("optimizer") == {}


def test_the_oldest_of_two_is_forgotten() -> None:
    found = kept(1, 2, 3)
    assert found.held() == held_of(1, [[1, 2], [1, 3]])
    assert [float(s.tensors["model/w"][0]) for s in found.states.values()] == [2.0, 3.0]


def test_the_memory_of_the_oldest_is_written_over_and_never_that_of_the_newest() -> None:
    found = kept(1, 2)
    oldest, newest = (found.states[1, r].tensors["model/w"] for r in (1, 2))
    found.keep((1, 3), tensors(3.0), {})
    assert found.states[1, 3].tensors["model/w"] is oldest
    assert found.states[1, 2].tensors["model/w"] is newest
    assert torch.equal(newest, torch.full((3,), 2.0))


def test_a_copy_that_fails_half_way_leaves_the_newest_boundary() -> None:
    found = kept(1, 2)
    broken: Any = {"model/w": torch.full((3,), 3.0), "model/x": None}
    with pytest.raises(AttributeError):
        found.keep((1, 3), broken, {})
    assert found.held() == held_of(1, [[1, 2]])
    assert torch.equal(found.states[1, 2].tensors["model/w"], torch.full((3,), 2.0))


def test_tensors_may_come_go_and_change_their_shape() -> None:
    """An optimizer has no state before its first step; a strategy may change."""
    found = kept(1, 2)
    other = {"model/w": torch.ones(5), "optimizer/m": torch.ones(2, dtype=torch.float64)}
    found.keep((1, 3), other, {})
    assert found.states[1, 3].tensors.keys() == other.keys()
    assert all(torch.equal(found.states[1, 3].tensors[k], v) for k, v in other.items())


def test_parameters_that_need_a_gradient_are_copied_without_one() -> None:
    found = KeptRounds()
    found.keep((1, 1), {"model/w": torch.ones(2, requires_grad=True)}, {})
    assert not found.states[1, 1].tensors["model/w"].requires_grad


def test_ranks_that_go_on_forget_what_came_after_the_boundary() -> None:
    found = kept(4, 8)
    found.go_on(2, (1, 4), 0, found.states[1, 4])
    assert found.held() == held_of(2, [[1, 4]])


# -- what ranks have in common --


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([], None),
        ([(0, []), (0, [])], None),
        ([(1, [(1, 4), (1, 8)]), (1, [(1, 0), (1, 4)])], (1, 4)),
        ([(1, [(1, 4), (1, 8)]), (1, [(1, 4), (1, 8)])], (1, 8)),
        # a new process has nothing
        ([(1, [(1, 4)]), (0, [])], (1, 4)),
        # one that sat out epoch 2 holds what is of no use
        ([(2, [(1, 4), (2, 8)]), (1, [(1, 4), (1, 9)])], (2, 8)),
        # the same round was computed twice, by other ranks
        ([(2, [(1, 4), (2, 8)]), (2, [(1, 4)]), (1, [(1, 4), (1, 8)])], (1, 4)),
    ],
)
def test_the_newest_boundary_of_all_ranks_that_trained_last(
    held: list[tuple[int, list[Any]]], expected: Boundary | None
) -> None:
    assert common_boundary([held_of(*each) for each in held]) == expected


def test_ranks_without_a_boundary_in_common_are_an_error() -> None:
    with pytest.raises(AssertionError, match="no boundary in common"):
        common_boundary([held_of(1, [(1, 4)]), held_of(1, [(1, 8)])])


# -- a model of ranks that die --


class Model:
    """Ranks in lockstep only where they exchange. A rank may leave an exchange when all have
    entered it (an exchange that is not atomic: some leave it, others die or are interrupted in it).
    What is kept is settled by the status exchange of the round.

    Gossip: within a round a rank exchanges with some others only, so that ranks may be rounds
    apart between two status exchanges."""

    def __init__(self, size: int, chance: random.Random, gossip: bool):
        self.chance, self.gossip = chance, gossip
        self.epoch = 1
        self.ranks = {r: KeptRounds(active=1) for r in range(size)}
        self.next_member = size
        self.begin(0)

    def begin(self, round: int) -> None:
        self.round = dict.fromkeys(self.ranks, round)
        self.first = round
        self.at: dict[int, str] = dict.fromkeys(self.ranks, "round")
        self.every = self.chance.randint(1, 4)  # rounds between status exchanges
        self.keeps = {r: self.chance.random() < 0.5 for r in range(round, round + 400)}
        for rank in self.ranks:
            self.keep(rank)

    def keep(self, rank: int) -> None:
        kept, round = self.ranks[rank], self.round[rank]
        if not any(r == round for _, r in kept.states):
            kept.keep((self.epoch, round), tensors(round, 1), {})

    def step(self) -> None:
        """One rank goes on, if it can."""
        rank = self.chance.choice(list(self.ranks))
        round, at = self.round[rank], self.at[rank]
        if at == "round":
            self.at[rank] = "exchange"
        elif at == "exchange" and self._all_entered(rank, round, "exchange"):
            self.round[rank] += 1
            due = (self.round[rank] - self.first) % self.every == 0
            self.at[rank] = "status" if due else "round"
        elif at == "status" and self._all_entered(rank, round, "status"):
            self.at[rank] = "boundary"
        elif at == "boundary":
            if self.keeps[round]:
                self.keep(rank)
            self.at[rank] = "round"

    def _all_entered(self, rank: int, round: int, where: str) -> bool:
        """Whether all whom this rank waits for have entered the same exchange."""
        steps = ("round", "exchange", "status", "boundary")
        if where == "exchange" and self.gossip:
            return True  # the partner of this round was there
        mine = (round, {"exchange": 1, "status": 0}[where])
        for other in self.ranks:
            at = steps.index(self.at[other])
            # status of round n follows the exchange that ended it, and begins round n
            theirs = (self.round[other], {0: 0.5, 1: 1, 2: 0, 3: 0.2}[at])
            if theirs < mine:
                return False
        return True

    def die(self, joins: bool) -> Boundary:
        """One rank dies, the others agree on a boundary and go on; one may join. Others may die
        when some have gone on already and some have not."""
        while True:
            del self.ranks[self.chance.choice(list(self.ranks))]
            found = common_boundary([k.held() for k in self.ranks.values()])
            assert found is not None
            state = next(k.states[found] for k in self.ranks.values() if found in k.states)
            if joins or len(self.ranks) < 2:
                self.ranks[self.next_member] = KeptRounds()
                self.next_member += 1
            self.epoch += 1
            again = self.chance.random() < 0.3 and len(self._have_state()) > 1
            for kept in self.ranks.values():
                if not again or self.chance.random() < 0.5:
                    kept.go_on(self.epoch, found, 0, kept.states.get(found, state))
            if not again:
                self.begin(found[1])
                return found

    def _have_state(self) -> list[int]:
        return [r for r, kept in self.ranks.items() if kept.states]


def walk(seed: int, gossip: bool) -> None:
    chance = random.Random(seed)
    model = Model(chance.randint(2, 4), chance, gossip)
    for _ in range(4):
        for _ in range(chance.randint(0, 150)):
            model.step()
        newest = max(max(k.states) for k in model.ranks.values())
        found = model.die(joins=chance.random() < 0.5)
        assert found <= newest


@pytest.mark.parametrize("gossip", [False, True], ids=["all", "gossip"])
def test_whenever_a_rank_dies_the_others_have_a_boundary_in_common(gossip: bool) -> None:
    for seed in range(400):
        walk(seed, gossip)


@pytest.mark.parametrize("gossip", [False, True], ids=["all", "gossip"])
def test_with_one_boundary_each_they_would_not(
    gossip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_rounds, "MOST", 1)
    with pytest.raises(AssertionError, match="no boundary in common"):
        for seed in range(400):
            walk(seed, gossip)


def test_without_the_status_exchange_before_it_a_boundary_would_not_be_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that gossip are rounds apart: only an exchange between all makes them keep together."""
    monkeypatch.setattr(Model, "_all_entered", lambda *_: True)
    with pytest.raises(AssertionError, match="no boundary in common"):
        for seed in range(400):
            walk(seed, True)


# -- replicas that are split over ranks --


def test_states_of_another_part_of_a_replica_are_of_no_use() -> None:
    """A member of a replica that stays incomplete may take a seat with another part."""
    whole = [held_of(1, [(1, 4)], part=r % 2) for r in range(4)]
    moved = [*whole[:3], held_of(1, [(1, 4)], part=0)]
    found = choose(moved, 2)
    assert found is not None and found.sources == {3: 1}


def test_a_rank_without_state_copies_a_replica_that_is_complete() -> None:
    first, second = held_of(1, [(1, 4)], part=0), held_of(1, [(1, 4)], part=1)
    none = held_of(0, [])
    found = choose([first, none, first, second], 2)
    assert found is not None and found.sources == {1: 3} and not found.copies
    # no replica is complete: any rank with the same part gives
    found = choose([first, none, none, second], 2)
    assert found is not None and found.sources == {1: 3, 2: 0}


def test_the_only_replica_goes_on_from_the_copy_of_a_neighbour() -> None:
    """Ranks copy at each boundary; the neighbour may have died in the middle of the newest."""
    left = held_of(1, [(1, 4), (1, 8)], copies=[(1, 4)])
    found = choose([left, held_of(0, [])], 2)
    assert found is not None and found.boundary == (1, 4)
    assert found.sources == {1: 0} and found.copies == {1}
    assert choose([held_of(1, [(1, 4)]), held_of(0, [])], 2) is None, "only disk is left"


def test_copies_of_a_neighbour_are_kept_as_long_as_ones_own() -> None:
    found = kept(4, 8)
    for round in (4, 8, 12):
        found.keep_copy((1, round), 1, KeptState(round, {}, {}))
    assert sorted(found.copies) == [(1, 8), (1, 12)]
    found.go_on(2, (1, 8), 0, found.states[1, 8])
    assert sorted(found.copies) == [(1, 8)]


def test_ranks_that_go_on_from_no_boundary_forget_all() -> None:
    found = kept(4, 8)
    found.start_anew(3, 0)
    assert found.held() == held_of(3, [])
