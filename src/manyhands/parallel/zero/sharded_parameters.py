"""ZeRO: a replica spread over the ranks of the shard axis, each of which owns 1/n of every span of parameters.

    1    all parameters, all gradients, 1/n of the optimizer's state        P + G + O/n
    2    all parameters, 1/n of gradients and state                         P + (G + O)/n + a bucket on its way
    3    1/n of all; a block's parameters are gathered while it runs        (P + G + O)/n + the blocks that are here

Inside one backward pass: gradients are summed over the axis into their owners' parts, with counts, use and loss; from there on
`values`, `grads`, `count` and moments are those of this rank's slices of ONE replica, for any merge rule between replicas. With
every micro-batch stages 2 and 3 sum anew and keep 1/n; stage 1 adds up at home and sums once a step. Owners step; before the
model runs again, stages 1 and 2 gather what owners have changed. Where the link has memory that is common to all ranks, stage 3
needs no gathering: every rank's 1/n lies in the one copy that all of them read.

Paper: Rajbhandari et al. 2020 (arXiv:1910.02054).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Group, Tensors, Work
from manyhands.errors import PlanError, TaskError
from manyhands.parallel.zero.block_gather import Gathering
from manyhands.parallel.zero.spans import (
    Span,
    SpanEntry,
    buckets,
    units,
)
from manyhands.replica.parameters import Allocate, Bucket, ParameterView, ReplicaGroup

STAGES = (1, 2, 3)


class ShardedParameters:
    """What `FlatParameters` is to a replica on one rank. `allocate` makes vectors that the group reduces in place, `common` such
    that all its ranks share; every rank starts from weights that are already the same. `short` is the type that stage 3 gathers
    the weights of matrix layers in, for use under autocast to it. `ahead`: how many blocks are gathered, and how many sums are under
    way, beside the one at work; 0 waits for each and holds least."""

    collects_gradients = True

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        stage: int,
        *,
        allocate: Allocate,
        common: Allocate | None = None,
        bucket_bytes: int = 8 << 20,
        unit_bytes: int = 1 << 20,
        short: torch.dtype | None = None,
        ahead: int = 1,
    ):
        if stage not in STAGES:
            raise PlanError(
                f"zero={stage}; needed: 1 (optimizer state), 2 (gradients too) or 3 (parameters too)"
            )
        self.module, self.group, self.stage, self.ahead = module, group, stage, ahead
        self.watch: Callable[[], None] | None = None  # called when memory is at a local peak
        self._named = [
            (i, n, p)
            for i, (n, p) in enumerate(
                (n, p) for n, p in module.named_parameters() if p.requires_grad
            )
        ]
        if not self._named:
            raise TaskError("no parameter of the model trains; set requires_grad=True for some")
        self.device = self._named[0][2].device
        self.gathers = stage == 3 and common is None
        self.common_bytes = 0
        self.gathering: Gathering | None = None
        self._root: Span | None = None
        self._values: Tensors = {}
        self._grads: Tensors = {}
        self.pool: dict[torch.dtype, list[Tensor]] = {}
        self._pending: list[tuple[Span, Work]] = []
        self._launched = 0
        self._sending = self._sent_any = False
        self._marked = False  # passes of this step are told of one by one
        self._used = [False] * len(self._named)
        self._dirty, self._overlap = False, True
        self.frozen: list[Span] = []
        if self.gathers:
            numbers = {id(p): i for i, _, p in self._named}
            made = units(module, numbers, short, unit_bytes, group.rank, group.size)
            every = [s for u in made for s in u.spans]
            self.spans, self.frozen = (
                [s for s in every if s.trains],
                [s for s in every if not s.trains],
            )
            self._own_vectors(self.spans, self._values, "value")
            self._own_vectors(self.frozen, {}, "value")
            self._root = next(
                (s for s in made[0].spans if s.trains), None
            )  # complete only when all others are
            self.gathering = Gathering(module, made, group, self._send, self._look, ahead > 0)
        else:
            self.spans = buckets(self._named, bucket_bytes, group.rank, group.size)
            self._resident(allocate if stage < 3 or common is None else common, stage == 3)
        if stage == 1:
            self._whole_gradients(allocate)
        else:
            self._own_vectors(self.spans, self._grads, "grad")
            for dtype in dict.fromkeys(s.dtype for s in self.spans):
                longest = max(s.length for s in self.spans if s.dtype == dtype)
                self.pool[dtype] = [allocate(longest, dtype) for _ in range(ahead + 1)]
        self.views = self._views()
        self.buckets = [
            Bucket(key, tuple(i for i, view in enumerate(self.views) if view.vector == key), grad)
            for key, grad in self._grads.items()
        ]
        self.count = torch.zeros(1 + len(self.views), device=self.device)
        self.replica_group = ReplicaGroup(self._sum, [1.0] * len(self.views))
        self._hooks: list[Any] = [
            p.parameter.register_post_accumulate_grad_hook(self._hook(s, p))
            for s in self.spans
            for p in s.places
        ]
        if not self.gathers:
            self._hooks.append(module.register_forward_pre_hook(lambda *_: self.refresh()))

    # -- memory --

    def _own_vectors(self, spans: list[Span], into: Tensors, what: str) -> None:
        """One long vector a dtype, in which every span has its place."""
        for dtype in dict.fromkeys(s.dtype for s in spans):
            some, at = [s for s in spans if s.dtype == dtype], 0
            each = [s.own.stop - s.own.start for s in some]
            key = str(dtype).removeprefix("torch.")
            vector = torch.zeros(sum(each), dtype=dtype, device=self.device)
            if self.gathers:
                into[key] = vector
            for s, length in zip(some, each, strict=True):
                setattr(s, what, vector[at : at + length])
                if not self.gathers:
                    into[s.key] = vector[at : at + length]
                at += length

    def _laid_out(self, allocate: Allocate) -> Iterator[tuple[Tensor, list[tuple[Span, Tensor]]]]:
        """A vector a dtype, and each span's place in it."""
        for dtype in dict.fromkeys(s.dtype for s in self.spans):
            some = [s for s in self.spans if s.dtype == dtype]
            lengths = [s.length for s in some]
            vector = allocate(sum(lengths), dtype)
            yield vector, list(zip(some, vector.split(lengths), strict=True))

    def _resident(self, allocate: Allocate, is_common: bool) -> None:
        """All values stay here; this rank's own are views of them."""
        for vector, each in self._laid_out(allocate):
            self.common_bytes += vector.nbytes if is_common else 0
            for s, full in each:
                for place in s.places:
                    if not is_common or self.group.rank == 0:
                        s.view(full, place).copy_(place.parameter.data)
                    place.parameter.data = s.view(full, place)
                s.full, s.value = full, full[s.own]
                self._values[s.key] = s.value
            if is_common:
                self.group.all_gather(
                    {"start": vector}
                ).wait()  # nobody reads before rank 0 has written

    def _whole_gradients(self, allocate: Allocate) -> None:
        for _, each in self._laid_out(allocate):
            for s, buffer in each:
                s.buffer, s.grad = buffer, buffer[s.own]
                self._grads[s.key] = s.grad

    def _views(self) -> list[ParameterView]:
        """This rank's slice of every parameter, as the optimizer and merge rules know it."""
        found: dict[int, ParameterView] = {}
        at: dict[str, int] = {}
        for s in self.spans:
            key = str(s.dtype).removeprefix("torch.") if self.gathers else s.key
            first = at.get(key, 0) if self.gathers else 0  # of the span in its vector
            at[key] = first + s.own.stop - s.own.start
            for place in s.places:
                start, stop = s.run(place)
                lo = place.start + start - s.own.start if start < stop else 0
                value, grad = (v[lo : lo + stop - start] for v in (s.value, s.grad))
                found[place.index] = ParameterView(
                    place.name, nn.Parameter(value), value, grad, key, first + lo
                )
        return [found[i] for i in range(len(found))]

    def runs(self) -> dict[str, tuple[int, int]]:
        """By name, which elements of each parameter, row by row, are this rank's: of those that train, then of frozen ones."""
        return {p.name: s.run(p) for s in (*self.spans, *self.frozen) for p in s.places}

    # -- what a replica and its rules see --

    @property
    def values(self) -> Tensors:
        self._dirty = True  # who asks may change them
        return self._values

    @property
    def grads(self) -> Tensors:
        return self._grads

    @property
    def used(self) -> Tensor:
        return self.count[1:]

    def shapes(self) -> dict[str, list[tuple[slice, torch.Size]]]:
        """What lies where in each vector, and in each bucket, which is one: slices have no shape but their length."""
        found: dict[str, list[tuple[slice, torch.Size]]] = {k: [] for k in self._values}
        for view in self.views:
            if n := view.value.numel():
                found[view.vector].append((slice(view.start, view.start + n), view.value.shape))
        return found

    @contextlib.contextmanager
    def holding(self, values: Tensors | None) -> Iterator[None]:
        """Have other `values` for a while; None: stay as it is. The model may run meanwhile, on all ranks of the axis alike."""
        own = None if values is None else {k: v.clone() for k, v in self._values.items()}
        for k, v in (values or {}).items():
            self.values[k].copy_(v)
        self.refresh()
        if self.gathering is not None:
            self.gathering.open = True
        try:
            yield
        finally:
            if self.gathering is not None:
                self.gathering.open = False
                self.gathering.release_all()
            if own is not None:
                if self.common_bytes:
                    self.refresh(always=True)  # somebody may still read
                for k, v in own.items():
                    self.values[k].copy_(v)

    def refresh(self, always: bool = False) -> None:
        """Have what the owners have changed: before the model runs. Every rank of the axis comes."""
        if self._dirty or always:
            if not self.gathers:
                for work in [self.group.all_gather({s.key: s.full}) for s in self.spans]:
                    work.wait()
            elif self.gathering is not None:
                self.gathering.release_all()
            self._dirty = False

    def _sum(self, values: Tensor) -> None:
        """Over the ranks of the axis, in place."""
        self.group.all_reduce({"inside": values}).wait()

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """An overflow in anybody's slice is one for all."""
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        flag = (
            torch.stack(
                [
                    *(f.to(self.device).view(()) for f in found.values()),
                    torch.zeros((), device=self.device),
                ]
            )
            .max()
            .view(1)
        )
        self.group.all_reduce({"overflow": flag}, "max").wait()
        found[self.device] = flag.view(())

    # -- one step of the replica: any number of backward passes, then one sum of what they counted --

    def start_window(self, overlap: bool) -> None:
        self._overlap = overlap
        self.refresh()
        if self.gathering is not None:
            self.gathering.start()
            self.gathering.open = True
        self._used = [False] * len(self._used)
        self._sending = self._sent_any = self._marked = False
        self._start_pass()
        for s in self.spans:
            s.summed = False
            s.filled.clear()
            for place in s.places:
                place.parameter.grad = None

    def before_backward(self, last: bool) -> None:
        """Of a pass that all ranks of the axis make together; without a word here, sums wait for the end of the step."""
        self._sending, self._marked = last or self.stage > 1, True
        self._start_pass()

    def after_backward(self, ran: bool) -> None:
        if self.gathering is not None:
            if not ran:
                raise TaskError(
                    "zero=3 gathers parameters while the model runs, but this rank has no samples and did not run it; let it borrow "
                    "one that does not count, or use zero=2"
                )
            self.gathering.finish()
        elif self._sending:
            for s in self.spans[self._launched :]:
                self._send(s)
        self._sent_any = self._sent_any or self._sending or self.gathers
        self._sending = False

    def end_window(self, total: Tensor, count: int) -> tuple[Tensor, int, list[bool]]:
        """Sum over the axis what each rank has of the loss, of samples, and of who used which parameter."""
        if not self._sent_any:
            if self.gathering is not None:
                self.gathering.finish()
            else:
                for s in self.spans:
                    self._send(s)
        while self._pending:
            self._settle(*self._pending.pop(0))
        if self.gathering is not None:
            self.gathering.open = False
        self._dirty = True  # a step comes
        told = torch.tensor(
            [0.0, count, *map(float, self._used)], dtype=torch.float64, device=self.device
        )
        told[0] = total
        self.group.all_reduce({"told": told}).wait()
        return told[0], round(float(told[1])), (told[2:] > 0).tolist()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.gathering is not None:
            self.gathering.close()

    # -- gradients: from the parameters into a buffer, and from all ranks' buffers into the owners' slices --

    def _start_pass(self) -> None:
        self._launched = 0
        for s in self.spans:
            s.seen.clear()
            s.sent = False

    def _hook(self, s: Span, place: SpanEntry) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self._used[place.index] = True
            s.seen.add(place.index)
            if s.sent and not self.gathers:
                raise TaskError(
                    f"{place.name} got its gradient twice in one backward pass, after the first part was sent; "
                    "use torch.utils.checkpoint with use_reentrant=False"
                )
            if (
                s.sent
                or s is self._root
                or not (self._sending or (self.stage == 1 and self._marked) or self.gathers)
            ):
                return  # it stays with the parameter until the end: stages of a pipeline may have to sum it first
            self._arrive(s)
            if s.buffer is None:
                s.buffer = self._buffer(s)
            self._look()
            if s.buffer is not None:
                self._fill(s, place)
            while (
                self._sending and self._overlap and not self.gathers
                and self._launched < len(self.spans) and len(self.spans[self._launched].seen) == len(self.spans[self._launched].places)
            ):  # fmt: skip  # in order on every rank
                self._send(self.spans[self._launched])

        return hook

    def _fill(self, s: Span, place: SpanEntry) -> None:
        grad = place.parameter.grad
        if grad is None:
            return
        assert s.buffer is not None
        into = s.view(s.buffer, place)
        into.add_(grad) if place.index in s.filled else into.copy_(grad)
        s.filled.add(place.index)
        place.parameter.grad = None

    def _send(self, s: Span) -> None:
        self._arrive(s)
        while s.buffer is None:
            s.buffer = self._buffer(s)
            if s.buffer is None and self._pending:
                self._settle(*self._pending.pop(0))
            elif s.buffer is None:
                self._give_back()
        for place in s.places:
            self._fill(s, place)
            if place.index not in s.filled:
                s.view(s.buffer, place).zero_()
        self._look()
        self._pending.append((s, self.group.reduce_scatter({s.key: s.buffer})))
        s.sent = True
        self._launched += 1
        while len(self._pending) > self.ahead:
            self._settle(*self._pending.pop(0))

    def _arrive(self, s: Span) -> None:
        """What an earlier pass sent of a span is over before its buffer is filled again."""
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

    def _buffer(self, s: Span) -> Tensor | None:
        """Where gradients of a span gather; None: all such memory is in use, they stay with their parameters for now."""
        if not self.pool[s.dtype]:
            return None
        s.lent = self.pool[s.dtype].pop()
        buffer = s.lent[: s.length]
        for gap in s.gaps():
            buffer[gap] = 0
        return buffer

    def _free(self, s: Span) -> None:
        assert s.lent is not None
        self.pool[s.dtype].append(s.lent)
        s.lent = None
        s.buffer = None
        s.filled.clear()

    def _give_back(self) -> None:
        """Half-filled buffers make room for one that is complete: their gradients go back to the parameters."""
        for s in self.spans:
            if s.buffer is not None and not s.sent:
                for place in s.places:
                    if place.index in s.filled:
                        place.parameter.grad = s.view(s.buffer, place).to(
                            place.parameter.dtype, copy=True
                        )
                self._free(s)
                return

    def _look(self) -> None:
        if self.watch is not None:
            self.watch()
