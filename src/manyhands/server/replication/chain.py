"""Chain member: what one server knows of the chain of one shard. Pure: no thread, no connection.

    applied        changes 1 ... applied are applied here, in this order
    acknowledged   changes 1 ... acknowledged are applied by this server and all after it
    kept           changes that are not acknowledged, to hand them on again after a failure

Invariants, along a chain of one version:  applied falls or stays equal from the first member to the
last; acknowledged <= applied of every later member; what one has applied begins with what any
later one has applied. A member is removed from a chain, never put in front of another, so they
survive every change of the chain; a learner becomes the last member with exactly what the last one
had. Hence the first member, whoever it is after a failure, has all that was ever acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Change = TypeVar("Change")


class OutOfOrder(Exception):
    """A change came whose predecessor is missing here."""


class ChainMember(Generic[Change]):
    """`me` is this server's number."""

    def __init__(self, me: int):
        self.me, self.version = me, 0
        self.members: tuple[int, ...] = ()
        self.learner: int | None = None  # that changes are handed on to already, by the last one
        self.applied = self.acknowledged = 0
        self.kept: deque[tuple[int, Change]] = deque()
        self.forget: Callable[[Change], None] = lambda change: None  # is called with what was kept

    # -- the chain --

    @property
    def leads(self) -> bool:
        return bool(self.members) and self.members[0] == self.me

    @property
    def before(self) -> int | None:
        at = self.members.index(self.me) if self.me in self.members else 0
        return self.members[at - 1] if at > 0 else None

    @property
    def after(self) -> int | None:
        """The member that changes are handed on to, and which acknowledges them."""
        if self.me not in self.members:
            return None
        at = self.members.index(self.me) + 1
        return self.members[at] if at < len(self.members) else self.learner

    def change(self, version: int, members: Sequence[int]) -> None:
        """The chain has other members."""
        if version < self.version:
            return
        self.version, self.members = version, tuple(members)
        if self.learner in self.members:
            self.learner = None
        self._settle()

    def teach(self, learner: int | None) -> None:
        """From now on a learner that has everything gets all changes too; None: no longer."""
        self.learner = learner
        self._settle()

    def _settle(self) -> None:
        if self.after is None:  # the last one, or alone
            self.acknowledge(self.applied)

    # -- changes --

    def lead(self, change: Change) -> int:
        """Number a change that came from a worker; it is to be applied now."""
        assert self.leads
        self.applied += 1
        self._keep(change)
        return self.applied

    def follow(self, number: int, change: Change) -> bool:
        """Whether a change from the member before is to be applied; False: it was."""
        if number <= self.applied:
            return False
        if number > self.applied + 1:
            raise OutOfOrder(f"change {number} came after change {self.applied}")
        self.applied = number
        self._keep(change)
        return True

    def _keep(self, change: Change) -> None:
        if self.after is None:
            self.forget(change)
            self.acknowledge(self.applied)
        else:
            self.kept.append((self.applied, change))

    def acknowledge(self, number: int) -> None:
        """All members after this one have applied the changes up to this one."""
        self.acknowledged = max(self.acknowledged, min(number, self.applied))
        while self.kept and self.kept[0][0] <= self.acknowledged:
            self.forget(self.kept.popleft()[1])

    def missing(self, applied: int) -> list[tuple[int, Change]] | None:
        """The changes that a member with so many has not got; None: it needs a copy."""
        if applied < self.acknowledged or applied > self.applied:
            return None
        return [(number, change) for number, change in self.kept if number > applied]
