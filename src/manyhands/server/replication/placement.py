"""Placement: which servers hold which shard. Pure functions; the coordinator sends what they say.

    start       server i is the first for the shards that it brings, its neighbours hold copies
    settle      after a server was lost or added: drop it from its chains, and choose for each chain
                that is too short a learner, the server that holds the fewest shards
    learned     the learner has its copy: it is the last member now
    adopt       a server that came after a loss holds the lost shards, empty
    move        one shard from the server with the most load to the one with the least

Chains are changed one member at a time, and a member leaves only when enough others are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from manyhands.server.protocol.messages import ShardChain

NOBODY = -1
UNEVEN = 0.25  # of the mean load: smaller differences are not worth a move


def start(shards: Mapping[int, int], replicas: int) -> list[ShardChain]:
    """Chains for servers (by number) that bring so many shards each."""
    servers = sorted(shards)
    found = []
    for at, server in enumerate(servers):
        others = [servers[(at + i) % len(servers)] for i in range(1, min(replicas, len(servers)))]
        found += [ShardChain(1, [server, *others]) for _ in range(shards[server])]
    return found


def settle(
    chains: Sequence[ShardChain],
    live: Collection[int],
    replicas: int,
    draining: Collection[int] = (),
) -> list[ShardChain]:
    """The same chains where nothing needs to change."""
    holds: Counter[int] = Counter(x for c in chains for x in (*c.members, c.learner))
    staying = [server for server in live if server not in draining]
    wanted, found = min(replicas, len(staying)), []
    for old in chains:
        chain = _without(old, [x for x in old.members if x not in live])
        if chain.learner != NOBODY and (chain.learner not in staying or not chain.members):
            chain = replace(chain, learner=NOBODY)
        chain, others = _let_leave(chain, wanted, draining)
        if chain.members and chain.learner == NOBODY and len(others) < wanted:
            free = [x for x in staying if x not in chain.members]
            if free:
                learner = min(free, key=lambda server: (holds[server], server))
                holds[learner] += 1
                chain = replace(chain, learner=learner)
        found.append(chain)
    return found


def _let_leave(
    chain: ShardChain, wanted: int, draining: Collection[int]
) -> tuple[ShardChain, list[int]]:
    """Without those that are to leave, once enough others are there; and the others."""
    while True:
        if chain.leaving not in chain.members:
            gone = next((x for x in chain.members if x in draining), NOBODY)
            chain = replace(chain, leaving=gone)
        others = [x for x in chain.members if x != chain.leaving and x not in draining]
        if chain.leaving == NOBODY or not others or len(others) < wanted:
            return chain, others
        chain = _without(chain, [chain.leaving])


def _without(chain: ShardChain, gone: Collection[int]) -> ShardChain:
    if not gone:
        return chain
    members = [x for x in chain.members if x not in gone]
    leaving = chain.leaving if chain.leaving in members else NOBODY
    return replace(chain, version=chain.version + 1, members=members, leaving=leaving)


def adopt(chains: Sequence[ShardChain], live: Collection[int]) -> list[ShardChain]:
    """A server that came after a loss holds the lost shards from now on, empty."""
    used = {x for chain in chains for x in (*chain.members, chain.learner)}
    fresh = [server for server in live if server not in used]
    return [
        chain
        if chain.members or not fresh
        else ShardChain(chain.version + 1, [fresh[0]], life=chain.life + 1)
        for chain in chains
    ]


def learned(chain: ShardChain) -> ShardChain:
    return replace(
        chain,
        version=chain.version + 1,
        members=[*chain.members, chain.learner],
        learner=NOBODY,
    )


def move(
    chains: Sequence[ShardChain], live: Collection[int], loads: Sequence[float]
) -> list[ShardChain] | None:
    """Let one shard go from the server with the most load to that with the least; None: no such
    move would help. `loads` are those of the shards."""
    total = dict.fromkeys(live, 0.0)
    for chain, load in zip(chains, loads, strict=True):
        if chain.learner != NOBODY or chain.leaving != NOBODY:
            return None  # one change at a time
        for server in chain.members:
            total[server] = total.get(server, 0.0) + load
    if len(total) < 2:
        return None
    most = max(total, key=lambda server: (total[server], -server))
    least = min(total, key=lambda server: (total[server], server))
    # less by what rounding may add: a shard as heavy as the gap would go to and fro
    gap = (total[most] - total[least]) * (1 - 1e-9)
    if gap <= UNEVEN * sum(total.values()) / len(total):
        return None
    can = [
        shard
        for shard, chain in enumerate(chains)
        if most in chain.members and least not in chain.members and 0 < loads[shard] < gap
    ]
    if not can:
        return None
    shard = min(can, key=lambda s: abs(loads[s] - gap / 2))
    found = list(chains)
    found[shard] = replace(found[shard], learner=least, leaving=most)
    return found


def held(server: int, chains: Sequence[ShardChain]) -> dict[str, list[int]]:
    """The shards that a server serves to workers, holds, gets a copy of, and gives away."""
    shards = list(enumerate(chains))
    return {
        "leads": [k for k, c in shards if c.members[:1] == [server]],
        "holds": [k for k, c in shards if server in c.members],
        "learns": [k for k, c in shards if c.learner == server],
        "gives": [k for k, c in shards if c.leaving == server],
    }
