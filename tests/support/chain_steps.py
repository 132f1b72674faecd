"""All that can happen next in a state of the model of chain replication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from manyhands.server.replication.chain import ChainMember
from support.chain_model import Chains
from support.chain_parts import Node, Op, Session

Step = tuple[str, Callable[[], Chains], bool]  # name, what follows, whether it is a fault


def steps(state: Chains) -> Iterator[Step]:
    yield from _workers(state)
    for n, node in state.nodes.items():
        yield from _servers(state, n, node)
    for s, session in state.sessions.items():
        yield from _messages(state, s, session)
    yield from _faults(state)


def _do(state: Chains, name: str, what: Callable[[Chains], Any], fault: str = "") -> Step:
    def run() -> Chains:
        made = state.clone()
        if fault:
            made.faults[fault] -= 1
        what(made)
        made.answer()
        return made

    return name, run, bool(fault)


def _workers(state: Chains) -> Iterator[Step]:
    ready = all(state.nodes[n].epoch >= state.epoch for n in state.there)
    for op, worker in state.workers.items():
        if worker.acknowledged:
            continue
        if worker.at is None and state.may_be_head(op, state.nodes[worker.head]):
            yield _do(state, f"{op} is pushed to {worker.head}", lambda x, op=op: x.push(op))
        if worker.epoch < state.epoch and ready:
            name = f"the worker of {op} gets map {state.epoch}"
            yield _do(state, name, lambda x, op=op: x.look_up(op))


def _servers(state: Chains, n: int, node: Node) -> Iterator[Step]:
    if node.told:
        yield _do(state, f"the coordinator hears that {n} has copied", lambda x: x.copied(n))
    if not node.alive:
        if n in state.there:
            yield _do(state, f"{n} is lost", lambda x: x.lose(n))
        return
    for epoch, chain in node.maps:  # a later one may come instead of an earlier one
        name = f"{n} gets map {epoch}: {chain.members}, learner {chain.learner}"
        yield _do(state, name, lambda x, e=epoch, c=chain: x.use(n, e, c))
    if node.member is not None:
        yield from _connections(state, n, node, node.member)


def _connections(state: Chains, n: int, node: Node, member: ChainMember[Op]) -> Iterator[Step]:
    after, chain = member.after, node.chain
    alone = node.link is None and node.connecting is None
    if alone and after is not None and state.nodes[after].alive:
        yield _do(state, f"{n} connects to {after}", lambda x: x.connect(n, after))
    if chain is None or chain.members[-1:] != [n] or chain.learner < 0:
        return
    learner = chain.learner
    if member.learner is None and node.copying is None and state.nodes[learner].alive:
        yield _do(state, f"{n} copies to {learner}", lambda x: x.copy(n, learner))


def _messages(state: Chains, s: int, x: Session) -> Iterator[Step]:
    src, dst = state.nodes[x.src], state.nodes[x.dst]
    src_there, dst_there = x.src_open and src.alive, x.dst_open and dst.alive
    if dst_there and x.fwd:
        waits = x.fwd[0][0] == "follow" and (dst.chain is None or dst.chain.version < x.version)
        if not waits:
            yield _do(state, f"{x.dst} takes {x.fwd[0]} of {s}", lambda y: y.take(s))
    if src_there and x.back:
        yield _do(state, f"{x.src} hears {x.back[0]} of {s}", lambda y: y.hear(s))
    if src_there and not dst_there and not x.back:
        yield _do(state, f"{x.src} sees the end of {s}", lambda y: y.src_ends(s))
    if dst_there and not src_there:
        yield _do(state, f"{x.dst} sees the end of {s}", lambda y: y.dst_ends(s))
    if state.faults.get("break") and src_there and dst_there:
        yield _do(state, f"{s} breaks", lambda y: y.src_ends(s), "break")


def _faults(state: Chains) -> Iterator[Step]:
    left = state.faults
    whole = [n for n in state.chain.members if n in state.there and state.nodes[n].alive]
    for n in state.there:
        if not state.nodes[n].alive:
            continue
        if left.get("forget") and state.nodes[n].member is not None:
            name = f"{n} registers again"
            yield _do(state, name, lambda x, n=n: x.register_again(n), "forget")
        if whole == [n]:
            continue  # nothing survives the loss of all
        if left.get("crash"):
            yield _do(state, f"{n} crashes", lambda x, n=n: x.kill(n), "crash")
        if left.get("suspect"):
            yield _do(state, f"{n} is given up", lambda x, n=n: x.lose(n), "suspect")
    if left.get("drain"):
        yield _do(state, "0 is drained", lambda x: x.drain(0), "drain")
