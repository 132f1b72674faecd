"""Parts of the model of chain replication: connections, servers and workers."""

from __future__ import annotations

from collections import deque
from typing import Any

from manyhands.server.protocol.messages import ShardChain
from manyhands.server.replication.chain import ChainMember

Op = str


class Part:
    """Something that is copied before it is changed; `key` is what it is compared by."""

    def clone(self) -> Any:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__.pop("_key", None)
        return made

    def key(self) -> Any:
        found = self.__dict__.get("_key")
        if found is None:
            found = self.__dict__["_key"] = self.make_key()
        return found

    def make_key(self) -> Any:
        return tuple(sorted((k, v) for k, v in self.__dict__.items() if k != "_key"))


class Session(Part):
    """One connection from a server to the next."""

    def __init__(self, src: int, dst: int, copy: int, version: int):
        self.src, self.dst, self.copy, self.version = src, dst, copy, version
        self.fwd: tuple[Any, ...] = (("follow",),)
        self.back: tuple[Any, ...] = ()
        self.src_open = self.dst_open = True
        self.sent = 0  # the last acknowledgement

    def make_key(self) -> Any:
        d = self.__dict__
        return tuple(v for k, v in d.items() if k != "_key")


class Node(Part):
    """One server. `member` is None where it does not hold the shard."""

    def __init__(self, me: int):
        self.me, self.alive, self.epoch = me, True, 0
        self.chain: ShardChain | None = None
        self.maps: tuple[tuple[int, ShardChain], ...] = ()  # on their way to it
        self.told: tuple[int, ...] = ()  # learners that it told the coordinator of
        self.begun = (-1, 0)
        self.make()

    def make(self) -> None:
        self.member: ChainMember[Op] | None = None
        self.log: tuple[Op, ...] = ()  # all changes
        self.data: tuple[Op, ...] = ()  # the ops that had an effect
        self.teacher = self.incoming = self.link = self.connecting = self.copying = None
        self.confirmed: int | None = None
        self.wanted = 0

    def clone(self) -> Node:
        made = super().clone()
        if (old := self.member) is not None:
            member = made.member = object.__new__(ChainMember)
            member.__dict__.update(old.__dict__)
            member.kept = deque(old.kept)
        return made

    def make_key(self) -> Any:
        if not self.alive:
            return (self.me, self.told)
        m = self.member
        chain = self.chain and (self.chain.version, *self.chain.members, -9, self.chain.learner)
        member = m and (m.version, m.members, m.learner, m.applied, m.acknowledged, len(m.kept))
        links = self.teacher, self.incoming, self.link, self.connecting, self.copying
        maps = tuple(epoch for epoch, _ in self.maps)
        rest = self.told, self.begun, self.confirmed, self.wanted, self.log, self.data
        return (self.me, self.epoch, chain, maps, member, links, rest)

    def leads(self) -> bool:
        return self.alive and self.member is not None and self.member.leads


class Worker(Part):
    """Pushes one op, again and again until it is acknowledged."""

    def __init__(self, epoch: int, head: int):
        self.epoch, self.head = epoch, head
        self.at: tuple[int, int] | None = None  # server and number of the change
        self.acknowledged = False

    def make_key(self) -> Any:
        return self.epoch, self.head, self.at, self.acknowledged
