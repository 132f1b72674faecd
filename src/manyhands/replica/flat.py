"""Flat parameters: a module's parameters as views of one long vector per dtype.

A second vector holds their gradients. Of several named optimizers, the parameters of each have
vectors of their own. Merge arithmetic, compression and checkpoints then work on
few long vectors, while the module and its optimizer keep their own parameters. Each parameter
starts at a multiple of 64 bytes, so that kernels load aligned; the padding stays zero. Gradients
are cut into buckets from the back, the order in which backward makes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.core import Tensors
from manyhands.replica.parameters import Allocate, Bucket, ParameterStorage, ParameterView

ALIGN_BYTES = 64


class FlatParameters:
    """Values and gradients of a model that this rank holds whole.

    `allocate` makes the vectors: in private memory, on a device, or in memory that the group
    reduces without a copy. `allocate_values` may make the values in memory that all ranks of a
    host share; then only one of them `writes` its weights there. `owners`: by id of a parameter,
    the name of its optimizer, where there are several.
    """

    collects_gradients = False
    replica_group = None  # this rank holds the whole replica

    def __init__(
        self,
        module: nn.Module,
        allocate: Allocate,
        bucket_bytes: int,
        allocate_values: Allocate | None = None,
        writes: bool = True,
        owners: Mapping[int, str] | None = None,
    ):
        self._module = module
        self._allocate_values, self._writes = allocate_values or allocate, writes
        self.in_common = False  # each rank steps the same values (`move`)
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.values: Tensors = {}
        self.grads: Tensors = {}
        self.views: list[ParameterView] = []
        self.buckets: list[Bucket] = []
        kinds = [(p.dtype, (owners or {}).get(id(p))) for _, p in named]
        for kind in dict.fromkeys(kinds):
            alike = [pair for pair, its in zip(named, kinds, strict=True) if its == kind]
            self._lay_out(alike, *kind, allocate, bucket_bytes)
        self._keep_in_place(allocate_values is not None)
        # the samples behind the gradient, then for each view how many ranks used it
        self.count = allocate(1 + len(self.views), torch.float32)

    def _keep_in_place(self, one_copy: bool) -> None:
        self._storage = ParameterStorage(
            self._module,
            [(view.name, view.parameter, view.value) for view in self.views],
            "ranks share one copy of it, which only rank 0 may change" if one_copy else "",
        )

    @property
    def used(self) -> Tensor:
        return self.count[1:]

    def move(self, values: Tensors, in_common: bool) -> None:
        """Make the parameters views of other vectors, with the values that these hold.

        `in_common`: each rank of a host steps them; else they are this rank's own.
        """
        self.take_back()
        self.values, self.in_common = dict(values), in_common
        for i, view in enumerate(self.views):
            vector, value = values[view.vector], view.value
            value = torch.as_strided(vector, value.shape, value.stride(), view.start)
            view.parameter.data = value
            self.views[i] = dataclasses.replace(view, value=value)
        self._keep_in_place(in_common)

    def _lay_out(
        self,
        named: list[tuple[str, nn.Parameter]],
        dtype: torch.dtype,
        owner: str | None,
        allocate: Allocate,
        bucket_bytes: int,
    ) -> None:
        align = max(1, ALIGN_BYTES // dtype.itemsize)
        starts, end = [], 0
        for _, p in named:
            starts.append(end)
            end += -(-p.numel() // align) * align
        key = str(dtype).removeprefix("torch.") + (f".{owner}" if owner else "")
        values, grads = self._allocate_values(end, dtype), allocate(end, dtype)
        self.values[key], self.grads[key] = values, grads
        first = len(self.views)
        for (name, p), start in zip(named, starts, strict=True):
            # keep the memory format (channels_last) if the parameter fills its memory without gaps
            stride = p.stride() if _dense(p) else torch.empty(p.shape, device="meta").stride()
            value = torch.as_strided(values, p.shape, stride, start)
            if self._writes:
                value.copy_(p.data)
            p.data = value
            self.views.append(
                ParameterView(
                    name,
                    p,
                    value,
                    torch.as_strided(grads, p.shape, stride, start),
                    key,
                    start,
                    owner,
                )
            )
        self._cut(first, [*starts, end], key, grads, bucket_bytes)

    def take_back(self) -> None:
        self._storage.take_back()

    @contextlib.contextmanager
    def holding(self, values: Tensors | None) -> Iterator[None]:
        """Hold other `values` inside the context; None: keep the current ones."""
        if values is None:
            yield
            return
        self.take_back()
        own = {k: v.clone() for k, v in self.values.items()}
        try:
            for k, v in values.items():
                self.values[k].copy_(v)
            yield
        finally:
            for k, v in own.items():
                self.values[k].copy_(v)

    def shapes(self) -> dict[str, list[tuple[slice, torch.Size]]]:
        """Slices and shapes of the parameters in each vector and in each bucket, by its name."""
        whole: dict[str, list[tuple[slice, torch.Size]]] = {k: [] for k in self.values}
        for view in self.views:
            whole[view.vector].append(
                (slice(view.start, view.start + view.parameter.numel()), view.parameter.shape)
            )
        for bucket in self.buckets:
            first = self.views[bucket.views[0]].start
            inside = [self.views[i] for i in bucket.views]
            whole[bucket.name] = [
                (slice(p.start - first, p.start - first + p.parameter.numel()), p.parameter.shape)
                for p in inside
            ]
        return whole

    # -- window hooks: one rank holds the whole replica, so they have nothing to exchange --

    def start_window(self, overlap: bool) -> None:
        pass

    def before_backward(self, last: bool) -> None:
        pass

    def after_backward(self, ran: bool) -> None:
        pass

    def end_window(self, total: Tensor, count: int) -> tuple[Tensor, int, None]:
        return total, count, None

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        pass

    def close(self) -> None:
        pass

    def _cut(
        self, first: int, bounds: list[int], key: str, grads: Tensor, bucket_bytes: int
    ) -> None:
        stop = len(bounds) - 1
        for i in reversed(range(len(bounds) - 1)):
            if (bounds[stop] - bounds[i]) * grads.element_size() >= bucket_bytes or i == 0:
                views = tuple(range(first + i, first + stop))
                self.buckets.append(
                    Bucket(f"{key}[{len(self.buckets)}]", views, grads[bounds[i] : bounds[stop]])
                )
                stop = i


def _dense(p: Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(p.shape, p.stride(), strict=True), key=lambda s: s[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
