"""Pending request: a request on a connection that has no answer yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manyhands.server.protocol import messages as m
from manyhands.server.protocol.arena import Arena, ArenaBlock

Parts = Sequence[np.ndarray]  # the payload of a frame


class PendingRequest:
    """`compose` makes the message and its payload each time the request is sent."""

    def __init__(
        self,
        what: str | Callable[[], str],
        compose: Callable[[], tuple[m.Message, Parts]],
        deadline: float,
    ):
        self._what, self.compose, self.deadline = what, compose, deadline
        self.number = -1
        self.block: ArenaBlock | None = None
        self.answer_at = 0  # within the block
        self.answer: Any = None
        self.arrived: np.ndarray | None = None  # payload of an answer for which no memory was given
        self.error: Exception | None = None
        self.done = self.abandoned = False
        self.on_answer: Callable[[PendingRequest], None] | None = None
        self.on_loss: Callable[[PendingRequest], None] | None = None  # given up without an answer
        self.commits = 0  # the last commit that was sent along

    @property
    def what(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def move(self, arena: Arena) -> None:
        """Copy to memory of a new connection."""
        if self.block is not None:
            self.block = arena.copy(self.block)

    def answer_memory(self, nbytes: int) -> np.ndarray:
        if self.block is not None and self.answer_at + nbytes <= self.block.nbytes:
            return self.block.memory[self.answer_at : self.answer_at + nbytes]
        self.arrived = np.empty(nbytes, np.uint8)
        return self.arrived
