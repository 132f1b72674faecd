"""Gradient reduce: gradients are summed over ranks into the owners' slices, span by span.

    stage 1        every pass adds to buffers on this rank; the step's last pass sums over ranks
    stages 2, 3    every pass is summed over ranks, and each owner adds its slice; 1 + lookahead
                   buffers serve all spans

A span is sent as soon as all its gradients are there, the spans in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands.core import Group, Work
from manyhands.errors import TaskError
from manyhands.parallel.zero.spans import Span, SpanEntry
from manyhands.replica.parameters import Allocate


class GradientReduce:
    """`root`: a span that is complete only when all others are. `by_block`: a block gather decides
    when spans are sent. `at_peak` is called when memory is at a local peak. `lookahead`: how many
    sums are under way beside the one at work."""

    def __init__(
        self,
        spans: list[Span],
        group: Group,
        stage: int,
        lookahead: int,
        root: Span | None,
        by_block: bool,
        at_peak: Callable[[], None],
    ):
        self.spans, self.group, self.stage, self.lookahead = spans, group, stage, lookahead
        self.pool: dict[torch.dtype, list[Tensor]] = {}
        self.used = [False] * sum(len(s.entries) for s in spans)  # by this rank, in this window
        self.sent_any = False  # in this window
        self._root, self._by_block, self._at_peak = root, by_block, at_peak
        self._pending: list[tuple[Span, Work]] = []
        self._launched = 0
        self._sending = False  # this pass is summed over ranks
        self._announced = False  # passes of this window are announced one by one
        self._overlap = True
        self._hooks: list[Any] = []

    def attach(self) -> None:
        """Register the gradient hooks, once the parameters have their final memory."""
        self._hooks = [
            e.parameter.register_post_accumulate_grad_hook(self._hook(s, e))
            for s in self.spans
            for e in s.entries
        ]

    def allocate_pool(self, allocate: Allocate) -> None:
        """Buffers for the spans that have none of their own."""
        for dtype in dict.fromkeys(s.dtype for s in self.spans):
            longest = max(s.length for s in self.spans if s.dtype == dtype)
            self.pool[dtype] = [allocate(longest, dtype) for _ in range(self.lookahead + 1)]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # -- one window: any number of backward passes --

    def start_window(self, overlap: bool) -> None:
        self._overlap = overlap
        self.used = [False] * len(self.used)
        self._sending = self.sent_any = self._announced = False
        self._start_pass()
        for s in self.spans:
            s.summed = False
            s.filled.clear()
            for entry in s.entries:
                entry.parameter.grad = None

    def start_pass(self, last: bool) -> None:
        """Before a pass that all ranks make together. Without this call sums wait for the end of
        the window."""
        self._sending, self._announced = last or self.stage > 1, True
        self._start_pass()

    def end_pass(self) -> None:
        """After it; a block gather has sent its spans by now."""
        if self._sending and not self._by_block:
            for s in self.spans[self._launched :]:
                self.send(s)
        self.sent_any = self.sent_any or self._sending or self._by_block
        self._sending = False

    def wait(self) -> None:
        """Finish all sums."""
        while self._pending:
            self._settle(*self._pending.pop(0))

    def _start_pass(self) -> None:
        self._launched = 0
        for s in self.spans:
            s.seen.clear()
            s.sent = False

    # -- one gradient --

    def _hook(self, s: Span, entry: SpanEntry) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self.used[entry.index] = True
            s.seen.add(entry.index)
            if s.sent and not self._by_block:
                raise TaskError(
                    f"{entry.name} got its gradient twice in one backward pass, after the first "
                    "part was sent; use torch.utils.checkpoint with use_reentrant=False"
                )
            collects = self._sending or (self.stage == 1 and self._announced) or self._by_block
            if s.sent or s is self._root or not collects:
                # it stays with the parameter until the end: pipeline stages may sum it first
                return
            self._settle_span(s)
            if s.buffer is None:
                s.buffer = self._buffer(s)
            self._at_peak()
            if s.buffer is not None:
                self._fill(s, entry)
            if self._sending and self._overlap and not self._by_block:
                self._send_complete()

        return hook

    def _send_complete(self) -> None:
        """In order, the same on every rank."""
        spans = self.spans
        while self._launched < len(spans) and len(spans[self._launched].seen) == len(
            spans[self._launched].entries
        ):
            self.send(spans[self._launched])

    def _fill(self, s: Span, entry: SpanEntry) -> None:
        grad = entry.parameter.grad
        if grad is None:
            return
        assert s.buffer is not None
        into = s.view(s.buffer, entry)
        into.add_(grad) if entry.index in s.filled else into.copy_(grad)
        s.filled.add(entry.index)
        entry.parameter.grad = None

    # -- one span --

    def send(self, s: Span) -> None:
        """Begin the sum of a span's gradients over the ranks."""
        self._settle_span(s)
        while s.buffer is None:
            s.buffer = self._buffer(s)
            if s.buffer is None and self._pending:
                self._settle(*self._pending.pop(0))
            elif s.buffer is None:
                self._give_back()
        for entry in s.entries:
            self._fill(s, entry)
            if entry.index not in s.filled:
                s.view(s.buffer, entry).zero_()
        self._at_peak()
        self._pending.append((s, self.group.reduce_scatter({s.key: s.buffer})))
        s.sent = True
        self._launched += 1
        while len(self._pending) > self.lookahead:
            self._settle(*self._pending.pop(0))

    def _settle_span(self, s: Span) -> None:
        """Finish the sum of an earlier pass before its buffer is filled again."""
        while any(under_way is s for under_way, _ in self._pending):
            self._settle(*self._pending.pop(0))

    def _settle(self, s: Span, work: Work) -> None:
        work.wait()
        if self.stage == 1:
            return
        assert s.buffer is not None
        own = s.buffer[s.own]
        s.grad.add_(own) if s.summed else s.grad.copy_(own)
        s.summed = True
        self._free(s)

    # -- buffers --

    def _buffer(self, s: Span) -> Tensor | None:
        """A buffer of the pool; None: all are in use, and gradients stay with their parameters for
        now."""
        if not self.pool[s.dtype]:
            return None
        s.pooled = self.pool[s.dtype].pop()
        buffer = s.pooled[: s.length]
        for gap in s.gaps():
            buffer[gap] = 0
        return buffer

    def _free(self, s: Span) -> None:
        assert s.pooled is not None
        self.pool[s.dtype].append(s.pooled)
        s.pooled = None
        s.buffer = None
        s.filled.clear()

    def _give_back(self) -> None:
        """Half-filled buffers make room for a complete one: their gradients go back to the
        parameters."""
        for s in self.spans:
            if s.buffer is not None and not s.sent:
                for entry in s.entries:
                    if entry.index in s.filled:
                        entry.parameter.grad = s.view(s.buffer, entry).to(
                            entry.parameter.dtype, copy=True
                        )
                self._free(s)
                return
