"""Sharded parameters (ZeRO): each rank of the shard axis owns 1/n of one replica.

    stage   on a rank                                               bytes
    1       all parameters, all gradients, 1/n of optimizer state   P + G + O/n
    2       all parameters, 1/n of gradients and state              P + (G + O)/n + a bucket
    3       1/n of all; blocks are gathered while they run          (P + G + O)/n + gathered blocks

Inside a backward pass gradients are summed over the axis into their owners' slices, with counts,
use and loss. From then on `values`, `grads`, `count` and moments are those of this rank's slices of
ONE replica, for any merge strategy between replicas. Stages 2 and 3 sum with every micro-batch and
keep 1/n; stage 1 adds up on its own rank and sums once a step. Owners step; before the model runs
again, stages 1 and 2 gather what owners have changed. Where the group has memory that is common to
all ranks, stage 3 needs no gathering: every rank's 1/n is in the one copy that all of them read.

Paper: Rajbhandari et al. 2020 (arXiv:1910.02054).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Group, Tensors
from manyhands.errors import PlanError, TaskError
from manyhands.parallel.zero.block_gather import BlockGather
from manyhands.parallel.zero.blocks import blocks
from manyhands.parallel.zero.gradient_reduce import GradientReduce
from manyhands.parallel.zero.span_memory import (
    allocate_gradients,
    allocate_slices,
    allocate_values,
    parameter_views,
)
from manyhands.parallel.zero.spans import Span, buckets
from manyhands.replica.deferred.unmade import make_parameters
from manyhands.replica.parameters import Allocate, Bucket, ParameterStorage, ReplicaGroup

STAGES = (1, 2, 3)


class ShardedParameters:
    """`ReplicaParameters` of a replica on the ranks of `group`. `allocate` makes vectors that the
    group reduces in place, `common` such that all its ranks share; every rank starts from weights
    that are already the same. `gather_dtype`: in which stage 3 gathers the weights of matrix
    layers, for use under autocast to it. `lookahead`: how many blocks are gathered, and how many
    sums are under way, beside the one at work; 0 waits for each and takes least memory."""

    collects_gradients = True
    in_common = False  # each rank steps its own slices

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        stage: int,
        *,
        allocate: Allocate,
        common: Allocate | None = None,
        bucket_bytes: int = 8 << 20,
        block_bytes: int = 1 << 20,
        gather_dtype: torch.dtype | None = None,
        lookahead: int = 1,
    ):
        if stage not in STAGES:
            raise PlanError(
                f"zero={stage}; needed: 1 (optimizer state), 2 (gradients too) or "
                "3 (parameters too)"
            )
        trained = _trained(module)
        self.module, self.group, self.device = module, group, trained[0][1].device
        self.watch: Callable[[], None] | None = None  # called when memory is at a local peak
        self.gathers = stage == 3 and common is None
        self.frozen: list[Span] = []
        self.common_bytes = 0
        self._changed = False  # owners may have changed values that this rank has not gathered
        rank, size, root, made = group.rank, group.size, None, []
        if self.gathers:
            indices = {id(p): i for i, (_, p) in enumerate(trained)}
            made = blocks(module, indices, gather_dtype, block_bytes, rank, size)
            every = [s for b in made for s in b.spans]
            self.spans = [s for s in every if s.trains]
            self.frozen = [s for s in every if not s.trains]
            self._values = allocate_slices(self.spans, "value", self.device, merged=True)
            allocate_slices(self.frozen, "value", self.device, merged=True)
            root = next((s for s in made[0].spans if s.trains), None)
        else:
            named = [(i, n, p) for i, (n, p) in enumerate(trained)]
            self.spans = buckets(named, bucket_bytes, rank, size)
            shared = common if stage == 3 else None
            self._values, self.common_bytes = allocate_values(
                self.spans, shared or allocate, group, shared is not None
            )
        by_block, at_peak = self.gathers, self._at_peak
        self.reduce = GradientReduce(self.spans, group, stage, lookahead, root, by_block, at_peak)
        self.gathering = (
            BlockGather(module, made, group, self.reduce.send, at_peak, lookahead > 0)
            if self.gathers
            else None
        )
        if stage == 1:
            self._grads = allocate_gradients(self.spans, allocate)
        else:
            self._grads = allocate_slices(self.spans, "grad", self.device, self.gathers)
            self.reduce.allocate_pool(allocate)
        make_parameters(module.parameters())  # frozen ones, which stay whole
        self._set_views()
        self.reduce.attach()
        self._refresh_hook = (
            None if self.gathers else module.register_forward_pre_hook(lambda *_: self.refresh())
        )

    def _set_views(self) -> None:
        self.views = parameter_views(self.spans, merged=self.gathers)
        self.buckets = [
            Bucket(key, tuple(i for i, view in enumerate(self.views) if view.vector == key), grad)
            for key, grad in self._grads.items()
        ]
        self.count = torch.zeros(1 + len(self.views), device=self.device)
        self.replica_group = ReplicaGroup(self._sum, [1.0] * len(self.views))
        whole = (
            [] if self.gathers else [(e, s.view(s.full, e)) for s in self.spans for e in s.entries]
        )
        self._storage = ParameterStorage(
            self.module,
            [(entry.name, entry.parameter, value) for entry, value in whole],
            "each rank trains its slice of it",
        )

    def owned(self) -> dict[str, tuple[int, int]]:
        """By name, which elements of each parameter, row by row, are this rank's: of those that
        train, then of frozen ones."""
        return {e.name: s.owned(e) for s in (*self.spans, *self.frozen) for e in s.entries}

    # -- what a replica and its merge strategy see --

    @property
    def values(self) -> Tensors:
        self._changed = True  # the caller may change them
        return self._values

    @property
    def grads(self) -> Tensors:
        return self._grads

    @property
    def used(self) -> Tensor:
        return self.count[1:]

    def take_back(self) -> None:
        self._storage.take_back()  # knows none where blocks are gathered, into ever new memory

    def shapes(self) -> dict[str, list[tuple[slice, torch.Size]]]:
        """The slices in each vector; a bucket is a vector. A slice of a parameter has no shape but
        its length."""
        found: dict[str, list[tuple[slice, torch.Size]]] = {k: [] for k in self._values}
        for view in self.views:
            if n := view.value.numel():
                found[view.vector].append((slice(view.start, view.start + n), view.value.shape))
        return found

    @contextlib.contextmanager
    def holding(self, values: Tensors | None) -> Iterator[None]:
        """Hold other `values` inside the context; None: keep the current ones. The model may run
        inside, on all ranks of the axis alike."""
        own = None if values is None else {k: v.clone() for k, v in self._values.items()}
        for k, v in (values or {}).items():
            self.values[k].copy_(v)
        self.refresh()
        if self.gathering is not None:
            self.gathering.on_read = True
        try:
            yield
        finally:
            if self.gathering is not None:
                self.gathering.on_read = False
                self.gathering.release_all()
            if own is not None:
                if self.common_bytes:
                    self.refresh(always=True)  # another rank may still read
                for k, v in own.items():
                    self.values[k].copy_(v)

    def refresh(self, always: bool = False) -> None:
        """Gather what the owners have changed, before the model runs. Every rank of the axis calls
        this."""
        if self._changed or always:
            if self.gathering is not None:
                self.gathering.release_all()
            else:
                for work in [self.group.all_gather({s.key: s.full}) for s in self.spans]:
                    work.wait()
            self._changed = False

    def _sum(self, values: Tensor) -> None:
        """Over the ranks of the axis, in place."""
        self.group.all_reduce({"sum": values}).wait()

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        flags = [f.to(self.device).view(()) for f in found.values()]
        flag = torch.stack([*flags, torch.zeros((), device=self.device)]).max().view(1)
        self.group.all_reduce({"overflow": flag}, "max").wait()
        found[self.device] = flag.view(())

    # -- one step: any number of backward passes, then one sum of what they counted --

    def start_window(self, overlap: bool) -> None:
        self.refresh()
        if self.gathering is not None:
            self.gathering.start()
            self.gathering.on_read = True
        self.reduce.start_window(overlap)

    def before_backward(self, last: bool) -> None:
        """All ranks of the axis make this pass together. Without this call sums wait for the end of
        the step."""
        self.reduce.start_pass(last)

    def after_backward(self, ran: bool) -> None:
        if self.gathering is not None:
            if not ran:
                raise TaskError(
                    "zero=3 gathers parameters while the model runs, but this rank has no samples "
                    "and did not run it; use zero=2, or batches that leave no rank without samples"
                )
            self.gathering.finish()
        self.reduce.end_pass()

    def end_window(self, total: Tensor, count: int) -> tuple[Tensor, int, list[bool]]:
        if not self.reduce.sent_any:
            if self.gathering is not None:
                self.gathering.finish()
            else:
                for s in self.spans:
                    self.reduce.send(s)
        self.reduce.wait()
        if self.gathering is not None:
            self.gathering.on_read = False
        self._changed = True  # the optimizer steps next
        used = map(float, self.reduce.used)
        sums = torch.tensor([0.0, count, *used], dtype=torch.float64, device=self.device)
        sums[0] = total
        self.group.all_reduce({"window": sums}).wait()
        return sums[0], round(float(sums[1])), (sums[2:] > 0).tolist()

    def close(self) -> None:
        self.reduce.close()
        if self._refresh_hook is not None:
            self._refresh_hook.remove()
        if self.gathering is not None:
            self.gathering.close()

    def _at_peak(self) -> None:
        if self.watch is not None:
            self.watch()


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    found = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not found:
        raise TaskError("no parameter of the model trains; set requires_grad=True for some")
    return found
