"""A model of chain replication of one shard: real decisions, modelled network and tables.

`ChainMember` and `placement` are the real ones. Connections are pairs of FIFO queues that break; a
server's content is the list of the ops that it has applied. What `replicator`, `follower`,
`copying`, `held_shards` and `server_registry` do with threads is here a step each: `chain_steps`
lists all that can happen next. A step copies what it changes, so states share the rest.
"""

from __future__ import annotations

from typing import Any

from manyhands.server.protocol.messages import ShardChain
from manyhands.server.replication import placement
from manyhands.server.replication.chain import ChainMember
from support.chain_parts import Node, Op, Session, Worker


class Chains:
    """One state. Tests that break the protocol override the methods under "what may be wrong"."""

    def __init__(self, members: int, spares: int, ops: str, faults: dict[str, int], replicas: int):
        self.replicas, self.faults = replicas, dict(faults)
        everybody = range(members + spares)
        self.chain = ShardChain(1, list(range(members)))
        self.epoch, self.there, self.draining = 1, tuple(everybody), ()
        self.nodes = {n: Node(n) for n in everybody}
        self.sessions: dict[int, Session] = {}
        self.workers = {op: Worker(1, 0) for op in ops}
        self.parted = False
        self._own: set[Any] = {id(x) for x in (*self.nodes.values(), *self.workers.values())}
        self.settle()
        for n in everybody:
            self.nodes[n].maps = ()
            self.use(n, self.epoch, self.chain)

    # -- copies --

    def clone(self) -> Chains:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.nodes, made.sessions = dict(self.nodes), dict(self.sessions)
        made.workers, made.faults, made._own = dict(self.workers), dict(self.faults), set()
        return made

    def _mine(self, of: dict[Any, Any], k: Any) -> Any:
        found = of[k]
        if id(found) not in self._own:
            found = of[k] = found.clone()
            self._own.add(id(found))
        found.__dict__.pop("_key", None)
        return found

    def node(self, n: int) -> Node:
        return self._mine(self.nodes, n)

    def session(self, s: int) -> Session:
        return self._mine(self.sessions, s)

    def key(self) -> Any:
        c = self.chain
        return (
            (self.epoch, c.version, *c.members, -9, c.learner, c.leaving, -9, *self.there),
            tuple(node.key() for node in self.nodes.values()),
            tuple((s, x.key()) for s, x in sorted(self.sessions.items())),
            tuple(w.key() for w in self.workers.values()),
            tuple(self.faults.values()),
        )

    # -- what may be wrong --

    def listens(self, node: Node, server: int) -> bool:
        assert node.member is not None
        return server in (node.member.before, node.teacher)

    def takes_copy(self, node: Node, server: int, attempt: int) -> bool:
        if node.teacher != server:
            return False
        return node.begun[0] != server or attempt > node.begun[1]

    def goes_on_alone(self, node: Node) -> bool:
        """Whether a server drops a learner whose connection broke."""
        assert node.member is not None
        return node.member.learner is not None and node.confirmed != node.member.learner

    def tells(self, node: Node) -> bool:
        """Whether it says again, to a coordinator that lost its connection, what was copied."""
        learner = node.member.learner if node.member is not None else None
        return learner is not None and learner == node.confirmed

    def acknowledges(self, node: Node) -> int:
        assert node.member is not None
        return node.member.acknowledged

    def apply(self, node: Node, op: Op) -> None:
        node.log += (op,)
        if op not in node.data:  # dedup marks
            node.data += (op,)

    def learned(self) -> ShardChain:
        return placement.learned(self.chain)

    def may_be_head(self, op: Op, node: Node) -> bool:
        return node.leads() and node.epoch == self.workers[op].epoch

    # -- coordinator --

    def settle(self) -> None:
        chain = placement.settle([self.chain], self.there, self.replicas, self.draining)[0]
        gone = [n for n in self.draining if n in self.there]
        gone = [n for n in gone if n not in (*chain.members, chain.learner)]
        if chain == self.chain and not gone:
            return
        self.chain, self.epoch = chain, self.epoch + 1
        self.there = tuple(n for n in self.there if n not in gone)
        for n in gone:  # it is told to leave
            self.kill(n)
        for n in self.there:
            self.node(n).maps += ((self.epoch, chain),)

    def lose(self, n: int) -> None:
        self.there = tuple(x for x in self.there if x != n)
        self.node(n).maps = ()
        self.settle()

    def kill(self, n: int) -> None:
        node = self.node(n)
        node.alive, node.member = False, None

    def copied(self, n: int) -> None:
        node = self.node(n)
        learner, node.told = node.told[0], node.told[1:]
        if self.chain.learner == learner and self.chain.members[-1:] == [n]:
            self.chain = self.learned()
            before = self.epoch
            self.settle()
            if self.epoch == before:
                self.epoch += 1
                for x in self.there:
                    self.node(x).maps += ((self.epoch, self.chain),)

    # -- a server gets a map (HeldShards.assign, Replicator.assign) --

    def use(self, n: int, epoch: int, chain: ShardChain) -> None:
        node = self.node(n)
        node.maps = tuple(x for x in node.maps if x[0] > epoch)
        node.epoch, node.chain = epoch, chain
        if n not in (*chain.members, chain.learner):
            self.drop(node)
            return
        if node.member is None:
            node.member = ChainMember(n)
        self.assign(node, chain)

    def drop(self, node: Node) -> None:
        for s in (node.link, node.connecting, node.copying):
            self.close_src(s)
        self.close_dst(node.incoming)
        node.make()

    def assign(self, node: Node, chain: ShardChain) -> None:
        member = node.member
        assert member is not None
        member.change(chain.version, chain.members)
        if member.learner is not None and chain.learner != member.learner:
            member.teach(None)
        if node.copying is not None and self.sessions[node.copying].dst != chain.learner:
            self.close_src(node.copying)
            node.copying = None
        if node.link is not None and self.sessions[node.link].dst != member.after:
            self.close_src(node.link)
            node.link = None
        learning = chain.learner == node.me and node.me not in chain.members
        node.teacher = chain.members[-1] if learning else None
        if node.incoming is not None and not self.listens(node, self.sessions[node.incoming].src):
            self.close_dst(node.incoming)
            node.incoming = None
        self.pass_on_acks(node)

    # -- connections --

    def open(self, src: int, dst: int, copy: int = 0) -> int:
        s = next(s for s in range(len(self.sessions) + 1) if s not in self.sessions)
        member = self.nodes[src].member
        assert member is not None
        made = self.sessions[s] = Session(src, dst, copy, member.version)
        self._own.add(id(made))
        return s

    def close_src(self, s: int | None) -> None:
        if s is not None and s in self.sessions:
            session = self.session(s)
            session.src_open, session.back = False, ()
            self._forget(s)

    def close_dst(self, s: int | None) -> None:
        if s is not None and s in self.sessions:
            session = self.session(s)
            session.dst_open, session.fwd = False, ()
            self._forget(s)

    def _forget(self, s: int) -> None:
        x = self.sessions[s]
        src, dst = x.src_open and self.nodes[x.src].alive, x.dst_open and self.nodes[x.dst].alive
        if not src and not dst:
            del self.sessions[s]

    def src_ends(self, s: int) -> None:
        """The server before sees that a connection is broken (Replicator._read, _reach, Copy)."""
        node = self.node(self.sessions[s].src)
        if node.link == s:
            node.link = None
            if self.goes_on_alone(node):
                assert node.member is not None
                node.member.teach(None)
                self.pass_on_acks(node)
        node.connecting = None if node.connecting == s else node.connecting
        node.copying = None if node.copying == s else node.copying
        self.close_src(s)

    def dst_ends(self, s: int) -> None:
        node = self.node(self.sessions[s].dst)
        node.incoming = None if node.incoming == s else node.incoming
        self.close_dst(s)

    # -- messages --

    def hand_on(self, node: Node, message: Any) -> None:
        if node.link is not None and self.sessions[node.link].dst_open:
            self.session(node.link).fwd += (message,)

    def pass_on_acks(self, node: Node) -> None:
        """Follower._acknowledge"""
        if node.incoming is not None and node.member is not None:
            session, value = self.session(node.incoming), self.acknowledges(node)
            if session.src_open and value > session.sent:
                session.back += (("done", value),)
                session.sent = value

    def take(self, s: int) -> None:
        """The next message arrives at the server after (HeldShards.follow, Follower)."""
        session = self.session(s)
        message, session.fwd = session.fwd[0], session.fwd[1:]
        node = self.node(session.dst)
        if message[0] == "follow":
            self.followed(s, session, node)
            return
        member = node.member
        if node.incoming != s or member is None:
            self.close_dst(s)
            return
        if message[0] == "state":
            _, number, node.log, node.data = message
            member.applied = member.acknowledged = number
            member.kept.clear()
            session.back += (("done", number),)
            session.sent = number
        elif member.follow(message[1], message[2]):
            self.hand_on(node, message)
            self.apply(node, message[2])
            self.pass_on_acks(node)

    def followed(self, s: int, session: Session, node: Node) -> None:
        refused = node.member is None or not self.listens(node, session.src)
        if session.copy and not refused:
            refused = not self.takes_copy(node, session.src, session.copy)
        if refused:
            session.back += (("refused", 0),)
            self.close_dst(s)
            return
        if session.copy:
            self.drop(node)
            node.begun = session.src, session.copy
            node.member = ChainMember(node.me)
            assert node.chain is not None
            self.assign(node, node.chain)
        self.close_dst(node.incoming)
        node.incoming = s
        assert node.member is not None
        session.back += (("done", node.member.applied),)
        self.pass_on_acks(node)

    def hear(self, s: int) -> None:
        """The next answer arrives at the server before."""
        session = self.session(s)
        (kind, value), session.back = session.back[0], session.back[1:]
        node = self.node(session.src)
        member = node.member
        if kind == "refused" or member is None:
            self.src_ends(s)
        elif node.connecting == s:
            self.attach(node, s, value)
        elif node.copying == s:  # Copy: rows, then the state; the learner follows from here on
            session.fwd += (("state", member.applied, node.log, node.data),)
            node.copying, node.link, node.wanted = None, s, member.applied
            node.confirmed = None
            member.teach(session.dst)
        elif node.link == s:
            member.acknowledge(value)
            if member.learner == session.dst and node.confirmed is None and value >= node.wanted:
                node.confirmed = member.learner
                node.told += (member.learner,)
            self.pass_on_acks(node)

    def attach(self, node: Node, s: int, applied: int) -> None:
        member, node.connecting = node.member, None
        assert member is not None
        missing = member.missing(applied)
        if member.after != self.sessions[s].dst or missing is None:
            self.parted = self.parted or member.after == self.sessions[s].dst
            self.close_src(s)
            return
        node.link = s
        self.session(s).fwd += tuple(("change", number, op) for number, op in missing)

    # -- workers --

    def push(self, op: Op) -> None:
        worker = self._mine(self.workers, op)
        node = self.node(worker.head)
        assert node.member is not None
        number = node.member.lead(op)
        self.hand_on(node, ("change", number, op))
        self.apply(node, op)
        worker.at = node.me, number

    def answer(self) -> None:
        """What can be acknowledged is; who waits at a server that cannot answer does no more."""
        for op, worker in self.workers.items():
            if worker.at is None or worker.acknowledged:
                continue
            node = self.nodes[worker.at[0]]
            if not node.leads():
                self._mine(self.workers, op).at = None
            elif self.acknowledges(node) >= worker.at[1]:
                self._mine(self.workers, op).acknowledged = True

    # -- steps --

    def look_up(self, op: Op) -> None:
        worker, head = self._mine(self.workers, op), self.chain.members[0]
        worker.at = worker.at if worker.head == head else None
        worker.epoch, worker.head = self.epoch, head

    def connect(self, n: int, after: int) -> None:
        self.node(n).connecting = self.open(n, after)

    def copy(self, n: int, learner: int) -> None:
        seen = [x.copy for x in self.sessions.values() if x.src == n]
        seen += [x.begun[1] for x in self.nodes.values() if x.begun[0] == n]
        self.node(n).copying = self.open(n, learner, 1 + max(seen, default=0))

    def register_again(self, n: int) -> None:
        """Its connection to the coordinator broke: what it said may not have arrived."""
        node = self.node(n)
        node.told = ()
        if self.tells(node):
            assert node.member is not None and node.member.learner is not None
            node.told = (node.member.learner,)

    def drain(self, n: int) -> None:
        self.draining = (n,)
        self.settle()
