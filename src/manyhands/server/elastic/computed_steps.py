"""Computed steps of a worker: which steps its next push sums up, and which it may report as done.

    begin      the worker computes a step
    mark       a push is made: it carries all steps computed since the push before
    done       all pushes so far are acknowledged by all shards: their steps are done

A strategy whose pushes are no sums over steps (elastic averaging, where a push is what a replica
gives to the centre and then lacks itself) marks nothing: skipping such a push on one shard would
lose what the replica gave.
"""

from __future__ import annotations

from manyhands.server.protocol.messages import PushMessage


class ComputedSteps:
    """`marks`: pushes carry their steps."""

    def __init__(self, marks: bool = True):
        self.marks = marks
        self.done_below = 0  # all steps below are done: the last sync point
        self._computed: list[int] = []
        self._pushed: list[int] = []

    def begin(self, step: int) -> None:
        self._computed.append(step)

    def mark(self, push: PushMessage) -> None:
        if self.marks:
            push.steps, push.done_below = self._computed, self.done_below
        self._pushed += self._computed
        self._computed = []

    def done(self) -> list[int]:
        """Call it when every push is acknowledged. What is returned must be reported."""
        done, self._pushed = self._pushed, []
        return done
