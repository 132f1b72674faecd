"""Chain replication: all orders of messages, crashes, suspicions and breaks, of small chains.

Every state that can be reached is looked at (`support.chain_model` says what can happen). Broken
protocols show that the exploration can fail.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from manyhands.server.protocol.messages import ShardChain
from manyhands.server.replication.chain import OutOfOrder
from support.chain_model import Chains
from support.chain_parts import Node
from support.chain_steps import steps


class Wrong(AssertionError):
    """A state that must not be, and the steps that led to it."""


def check(state: Chains) -> None:
    chain = [state.nodes[n] for n in state.chain.members if state.nodes[n].alive]
    assert chain, "no member is left"
    first = chain[0]
    assert not state.parted, "a member lacked what was not kept"
    for op, worker in state.workers.items():
        if worker.acknowledged:
            assert op in first.data, f"{op} was acknowledged, and is lost"
    for node in state.nodes.values():
        assert len(set(node.data)) == len(node.data), f"{node.me} applied an op twice"
        if node.leads():  # what it answers reads with; it may not know that it was replaced
            known = node.log[: state.acknowledges(node)]
            for member in chain:
                assert member.log[: len(known)] == known, f"{node.me} shows what is lost"
    for before, after in pairwise(chain):
        assert before.log[: len(after.log)] == after.log, f"{after.me} has what {before.me} has not"
        assert before.member is not None
        assert before.member.acknowledged <= len(after.log), f"{after.me} lacks acknowledged ops"


def done(state: Chains) -> bool:
    """Everything was delivered and acknowledged, and there are as many members as there can be."""
    members = min(state.replicas, sum(n not in state.draining for n in state.there))
    return (
        all(worker.acknowledged for worker in state.workers.values())
        and all(node.epoch == state.epoch for n, node in state.nodes.items() if n in state.there)
        and len(state.chain.members) == members
        and len({state.nodes[n].log for n in state.chain.members}) == 1
    )


def explore(start: Chains, live: bool = True, most: int = 2_000_000) -> int:
    """Look at every state that can be reached; how many there are."""
    number: dict[Any, int] = {start.key(): 0}
    came: list[tuple[int, str]] = [(-1, "")]
    before: list[list[int]] = [[]]  # states that lead to each without a fault
    good, todo = [], [(0, start)]
    while todo:
        at, state = todo.pop()
        try:
            check(state)
        except AssertionError as e:
            raise Wrong(f"{e}:\n" + "\n".join(path(came, at))) from None
        if live and done(state):
            good.append(at)
        for name, run, fault in steps(state):
            after = run()
            key = after.key()
            found = number.get(key)
            if found is None:
                found = number[key] = len(came)
                assert found < most, "too many states"
                came.append((at, name))
                before.append([])
                todo.append((found, after))
            if not fault:
                before[found].append(at)
    if live:
        stuck = set(range(len(came))) - reaching(good, before)
        if stuck:
            raise Wrong("nothing more is done:\n" + "\n".join(path(came, min(stuck))))
    return len(came)


def reaching(good: list[int], before: list[list[int]]) -> set[int]:
    found, todo = set(good), list(good)
    while todo:
        for at in before[todo.pop()]:
            if at not in found:
                found.add(at)
                todo.append(at)
    return found


def path(came: list[tuple[int, str]], at: int) -> list[str]:
    steps = []
    while at > 0:
        at, name = came[at]
        steps.append(name)
    return steps[::-1]


# -- the protocol --

CASES = [
    # members, spares, ops, faults, replicas
    (2, 0, "abc", {"crash": 1}, 2),
    (2, 0, "abc", {"break": 1}, 2),
    (2, 0, "ab", {"suspect": 1, "break": 1}, 2),
    (2, 1, "ab", {"crash": 1}, 2),
    (2, 1, "a", {"suspect": 1}, 2),
    (2, 1, "a", {"crash": 1, "break": 1}, 2),
    (2, 1, "ab", {"drain": 1}, 2),
    (1, 1, "ab", {"break": 1}, 2),
    (1, 1, "a", {"break": 1, "forget": 1, "crash": 1}, 2),
    (1, 1, "abc", {"drain": 1}, 1),
    (3, 0, "ab", {"crash": 1}, 3),
    (3, 0, "a", {"suspect": 1}, 3),
    (3, 0, "a", {"crash": 2}, 3),
]
LARGE = [
    (1, 1, "ab", {"break": 1, "crash": 1, "forget": 1}, 2),
    (2, 1, "ab", {"suspect": 1}, 2),
    (2, 1, "a", {"crash": 2, "break": 1}, 2),
    (2, 2, "a", {"crash": 2}, 2),
    (2, 1, "ab", {"drain": 1, "crash": 1}, 2),
    (3, 0, "ab", {"suspect": 1}, 3),
    (3, 0, "a", {"suspect": 2}, 3),
    (3, 0, "ab", {"crash": 2}, 3),
    (3, 1, "a", {"crash": 1}, 3),
    (3, 0, "a", {"suspect": 1, "crash": 1, "break": 1}, 3),
    (2, 0, "abc", {"suspect": 1}, 2),
]


def name_of(case: Any) -> str:
    members, spares, ops, faults, _ = case
    words = "-".join(f"{count}-{name}" for name, count in faults.items())
    return f"{members}+{spares}-servers-{len(ops)}-ops-{words}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_no_order_of_events_loses_an_acknowledged_push(case: Any) -> None:
    assert explore(Chains(*case)) > 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", LARGE, ids=name_of)
def test_no_order_of_events_loses_an_acknowledged_push_in_larger_chains(case: Any) -> None:
    assert explore(Chains(*case)) > 1000


# -- broken protocols --


class ListensToAnybody(Chains):
    def listens(self, node: Node, server: int) -> bool:
        return True


class AcknowledgesWhatIsOnlyHere(Chains):
    def acknowledges(self, node: Node) -> int:
        assert node.member is not None
        return node.member.applied


class SaysCopiedTooEarly(Chains):
    def tells(self, node: Node) -> bool:
        return node.member is not None and node.member.learner is not None


class GoesOnWithoutItsLearner(Chains):
    def goes_on_alone(self, node: Node) -> bool:
        return node.member is not None and node.member.learner is not None


class NeverCopiesAgain(Chains):
    def goes_on_alone(self, node: Node) -> bool:
        return False


class TakesOldCopies(Chains):
    def takes_copy(self, node: Node, server: int, attempt: int) -> bool:
        return node.teacher == server


class TakesCopiesAsMember(Chains):
    def takes_copy(self, node: Node, server: int, attempt: int) -> bool:
        return True


class AppliesAgain(Chains):
    def apply(self, node: Node, op: str) -> None:
        node.log += (op,)
        node.data += (op,)


class PutsLearnersInFront(Chains):
    def learned(self) -> ShardChain:
        chain = super().learned()
        return replace(chain, members=chain.members[::-1])


class KeepsNothing(Chains):
    def hand_on(self, node: Node, message: Any) -> None:
        super().hand_on(node, message)
        assert node.member is not None
        node.member.kept.clear()


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (ListensToAnybody, (2, 0, "ab", {"suspect": 1}, 2)),
        (AcknowledgesWhatIsOnlyHere, (2, 0, "a", {"crash": 1}, 2)),
        (SaysCopiedTooEarly, (1, 1, "a", {"forget": 1, "crash": 1}, 2)),
        (GoesOnWithoutItsLearner, (1, 1, "ab", {"break": 1, "crash": 1}, 2)),
        (NeverCopiesAgain, (1, 1, "a", {"break": 1}, 2)),
        (TakesOldCopies, (1, 1, "a", {"break": 1, "crash": 1}, 2)),
        (TakesCopiesAsMember, (1, 1, "a", {"break": 1, "crash": 1}, 2)),
        (AppliesAgain, (2, 0, "a", {"crash": 1}, 2)),
        (PutsLearnersInFront, (1, 1, "ab", {}, 2)),
        (KeepsNothing, (2, 0, "a", {"break": 1}, 2)),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_a_broken_protocol_is_found(broken: type[Chains], case: Any) -> None:
    with pytest.raises((Wrong, OutOfOrder)):
        explore(broken(*case))
