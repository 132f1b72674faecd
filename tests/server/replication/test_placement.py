"""Placement of copies: what holds after any sequence of losses, arrivals, drains and moves."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from manyhands.server.protocol.messages import ShardChain
from manyhands.server.replication.placement import NOBODY, learned, move, settle, start

SEEDS = range(200)


class Fleet:
    """Servers and chains, changed as the coordinator changes them; every change is checked."""

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        servers = self.chance.randint(1, 6)
        self.replicas = self.chance.randint(1, min(3, servers))
        self.live, self.draining = list(range(servers)), set[int]()
        shards = {server: self.chance.randint(1, 3) for server in self.live}
        self.chains = start(shards, self.replicas)
        self.next = servers

    def use(self, found: list[ShardChain]) -> None:
        for old, new in zip(self.chains, found, strict=True):
            check_change(old, new, set(self.live), self.draining)
        self.chains = found

    def settle(self) -> None:
        self.use(settle(self.chains, self.live, self.replicas, self.draining))

    def learn(self, shard: int) -> None:
        before = self.chains[shard]
        now = learned(before)
        assert now.members == [*before.members, before.learner]
        assert now.learner == NOBODY and now.version == before.version + 1
        self.chains[shard] = now
        self.settle()

    def lose(self, server: int) -> None:
        self.live.remove(server)
        self.draining.discard(server)
        self.settle()

    def step(self) -> None:
        learning = [s for s, chain in enumerate(self.chains) if chain.learner != NOBODY]
        match self.chance.randrange(6):
            case 0 if self.live:
                self.lose(self.chance.choice(self.live))
            case 1:
                self.live.append(self.next)
                self.next += 1
                self.settle()
            case 2 if len(self.live) - len(self.draining) > 1:
                self.draining.add(self.chance.choice(self.live))
                if len(self.draining) == len(self.live):
                    self.draining.pop()
                self.settle()
            case 3:
                loads = [float(self.chance.randint(0, 9)) for _ in self.chains]
                staying = [x for x in self.live if x not in self.draining]
                self.use(move(self.chains, staying, loads) or self.chains)
            case _ if learning:
                self.learn(self.chance.choice(learning))

    def finish(self) -> int:
        """Let all copies come to their end; how many there were."""
        for copies in range(1000):
            learning = [s for s, chain in enumerate(self.chains) if chain.learner != NOBODY]
            if not learning:
                return copies
            self.learn(learning[0])
        raise AssertionError("copies do not end")


def check_change(old: ShardChain, new: ShardChain, live: set[int], draining: set[int]) -> None:
    assert len(set(new.members)) == len(new.members)
    assert new.learner not in new.members and new.leaving in (NOBODY, *new.members)
    assert new.learner == NOBODY or new.learner in live
    stay = [x for x in old.members if x in new.members]
    assert new.members == stay, "only members that learned are added, and at the end"
    assert set(new.members) <= live
    if not old.members:
        assert not new.members and new.learner == NOBODY, "what is lost stays lost"
    elif live & set(old.members):
        assert new.members, "a member that was there was given up"
    changed = new.members != old.members
    assert (new.version > old.version) if changed else (new.version == old.version)
    if old.learner in live - draining and set(old.members) & live:
        assert new.learner == old.learner, "a copy that was under way was given up"


@pytest.mark.parametrize("block", range(4))
def test_any_sequence_of_events(block: int) -> None:
    for seed in SEEDS[block::4]:
        fleet = Fleet(seed)
        for _ in range(60):
            fleet.step()
        fleet.settle()
        fleet.finish()
        staying = [x for x in fleet.live if x not in fleet.draining]
        wanted = min(fleet.replicas, len(staying))
        for chain in fleet.chains:
            if chain.members:
                assert len(chain.members) >= wanted
                assert not set(chain.members) & fleet.draining, "a drain did not end"
                assert chain.leaving == NOBODY
        again = settle(fleet.chains, fleet.live, fleet.replicas, fleet.draining)
        assert again == fleet.chains


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_first_chains_are_even(replicas: int) -> None:
    for servers in range(replicas, 7):
        chains = start(dict.fromkeys(range(servers), 2), replicas)
        holds = Counter(x for chain in chains for x in chain.members)
        assert set(holds.values()) == {2 * replicas}
        assert Counter(chain.members[0] for chain in chains) == dict.fromkeys(range(servers), 2)
        assert settle(chains, range(servers), replicas) == chains


def test_a_loss_moves_only_what_the_lost_server_held() -> None:
    for servers in range(3, 8):
        chains = start(dict.fromkeys(range(servers), 1), 2)
        for lost in range(servers):
            live = [x for x in range(servers) if x != lost]
            found = settle(chains, live, 2)
            for old, new in zip(chains, found, strict=True):
                if lost not in old.members:
                    assert new == old
                else:
                    assert new.members == [x for x in old.members if x != lost]
                    assert new.learner not in (NOBODY, *old.members)
            learners = Counter(chain.learner for chain in found if chain.learner != NOBODY)
            assert max(learners.values()) - min(learners.values()) <= 1


def test_a_server_leaves_only_when_enough_others_hold_its_shards() -> None:
    chains = start({0: 1, 1: 1, 2: 1}, 2)
    found = settle(chains, [0, 1, 2], 2, [0])
    mine = [chain for chain in found if 0 in chain.members]
    assert [chain.members for chain in mine] == [[0, 1], [2, 0]]
    assert [chain.learner for chain in mine] == [2, 1]
    assert all(chain.leaving == 0 for chain in mine)
    after = settle([learned(mine[0])], [0, 1, 2], 2, [0])
    assert after[0].members == [1, 2] and after[0].leaving == NOBODY


def test_two_servers_are_drained_at_once() -> None:
    chains = [ShardChain(1, [0, 1])]
    for _ in range(2):
        chains = settle(chains, range(4), 2, [0, 1])
        assert chains[0].members[:2] == [0, 1]
        chains = [learned(chains[0])]
    # with the second copy both may go; nothing else will happen that could let the second one go
    assert settle(chains, range(4), 2, [0, 1])[0].members == [2, 3]


def test_moves_end_and_even_out_the_load() -> None:
    for seed in SEEDS:
        chance = random.Random(seed)
        servers = chance.randint(2, 6)
        chains = start(dict.fromkeys(range(servers), 2), chance.randint(1, servers - 1) or 1)
        replicas = len(chains[0].members)
        loads = [chance.random() for _ in chains]
        live = [*range(servers), servers]  # the last one came later, and holds nothing

        def spread(chains: list[ShardChain]) -> float:
            total = Counter(dict.fromkeys(live, 0.0))  # noqa: B023 (called in this round)
            for chain, load in zip(chains, loads, strict=True):  # noqa: B023
                total.update(dict.fromkeys(chain.members, load))
            mean = sum(total.values()) / len(total)
            return sum((t - mean) ** 2 for t in total.values())

        for _ in range(200):
            found = move(chains, live, loads)
            if found is None:
                break
            assert sum(a != b for a, b in zip(chains, found, strict=True)) == 1
            assert move(found, live, loads) is None, "one change at a time"
            before = spread(chains)
            shard = next(s for s, chain in enumerate(found) if chain.learner != NOBODY)
            found[shard] = learned(found[shard])
            chains = settle(found, live, replicas)
            assert spread(chains) < before + 1e-12
            assert all(len(chain.members) == replicas for chain in chains)
        else:
            raise AssertionError("moves do not end")
        assert any(servers in chain.members for chain in chains)
