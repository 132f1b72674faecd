"""Collective group: exchange over torch.distributed (gloo, nccl, or mpi where torch has it).

    sum, max      the backend's own all-reduce, one per tensor, all under way at once
    mean          sum, then one division by the number of ranks when `wait` returns
    broadcast     the backend's own, of bytes, so that any dtype works
    barrier       the backend's own
    swap          receives first, then sends, then waits for all: every send finds its receive
    transfer      the same under another tag, so that swaps and transfers under way do not mix

It uses a process group of its own, never torch's default group, so that one process can hold
several and a lost one can be replaced. A contiguous tensor whose dtype the backend knows is sent
without a copy, any other as a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from manyhands.core import (
    Finished,
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.errors import PeerLost, PlanError
from manyhands.exchange import reduce_scatter
from manyhands.exchange.interruption import (
    InterruptibleStore,
    Interruption,
    open_sockets,
    shut_down,
)
from manyhands.exchange.solo import check_source, to_oneself

OPS: dict[Op, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
}
# dtypes that gloo and nccl sum; others are sent as a wider one
NATIVE = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
SENT_AS = {t: t for t in NATIVE} | {
    torch.int16: torch.int32,
    torch.bool: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
SWAP, TRANSFER = 0, 1  # tags


class CollectiveGroup(Group):
    """`device` is where the backend takes tensors from (gloo: cpu); None: from where they are.
    `close` ends the process group; without it, a group that belongs to others stays open."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device | None = None,
        close: Callable[[], None] | None = None,
    ):
        self.rank, self.size = process_group.rank(), process_group.size()
        self._open: dist.ProcessGroup | None = process_group
        self._device, self._close = device, close
        self._calls = 0

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        if self.size == 1:
            return Finished()
        what = self._next("all_reduce")
        pending: list[tuple[Tensor, Tensor]] = []
        for name, value in values.items():
            if value.numel():
                if value.dtype not in SENT_AS:
                    known = ", ".join(str(t).removeprefix("torch.") for t in SENT_AS)
                    raise ValueError(
                        f"all_reduce of {name!r}, which is {value.dtype}; needed: one of {known}; "
                        "convert it first"
                    )
                value = value.detach()
                pending.append(
                    (
                        value,
                        value.to(self._device or value.device, SENT_AS[value.dtype]).contiguous(),
                    )
                )
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(OPS[op])
        options.asyncOp = True  # else nccl runs on the compute stream and overlaps with nothing
        try:
            works = [self._group.allreduce([sent], options) for _, sent in pending]
        except RuntimeError as e:
            raise self._lost(what, e) from e
        return _Exchange(self, what, works, pending, self.size if op == "mean" else 1)

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        check_source(self, source)
        if self.size == 1:
            return Finished()
        what = self._next("broadcast")
        # as bytes: the backend need not know the dtype, and no bit changes
        pending = [
            (v, v.to(self._device or v.device).contiguous())
            for v in (value.detach() for value in values.values() if value.numel())
        ]
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = source, True
        try:
            works = [self._group.broadcast([_bytes(sent)], options) for _, sent in pending]
        except RuntimeError as e:
            raise self._lost(what, e) from e
        return _Exchange(self, what, works, pending)

    def barrier(self) -> None:
        if self.size == 1:
            return
        what, options = self._next("barrier"), dist.BarrierOptions()
        if self._device is not None:
            options.device = self._device
        try:
            self._group.barrier(options).wait()
        except RuntimeError as e:
            raise self._lost(what, e) from e

    def own(self, tensor: Tensor) -> list[slice]:
        return [reduce_scatter.equal_part(tensor.numel(), self.rank, self.size)]

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        # gloo's own is an all-reduce of a copy: twice the bytes
        if op == "mean" or not self._has_halves(values):
            return reduce_scatter.reduce_scatter(self, values, op)
        what, options = self._next("reduce_scatter"), dist.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp(OPS[op]), True
        return self._halves(
            what, values, lambda v, own: self._group._reduce_scatter_base(own, v, options)
        )

    def all_gather(self, values: Tensors) -> Work:
        if not self._has_halves(values, on_cpu=True):
            return reduce_scatter.all_gather(self, values)
        what, options = self._next("all_gather"), distributed_c10d.AllgatherOptions()
        options.asyncOp = True
        return self._halves(
            what, values, lambda v, own: self._group._allgather_base(v, own, options)
        )

    def _has_halves(self, values: Tensors, on_cpu: bool = False) -> bool:
        """Whether the backend itself cuts these into equal parts, on their device."""
        return self.size > 1 and all(
            v.numel()
            and v.numel() % self.size == 0
            and v.dtype in NATIVE
            and v.ndim == 1
            and v.is_contiguous()
            and not v.requires_grad
            and (v.device.type == "cuda" or on_cpu)
            and self._device in (None, v.device)
            for v in values.values()
        )

    def _halves(
        self, what: str, values: Tensors, begin: Callable[[Tensor, Tensor], dist.Work]
    ) -> Work:
        try:
            works = [begin(v, v[self.own(v)[0]]) for v in values.values()]
            return _Exchange(self, what, works)
        except RuntimeError as e:
            raise self._lost(what, e) from e

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        return self.begin_swap(values, peers)()

    def begin_swap(self, values: Tensors, peers: Sequence[int]) -> Callable[[], list[Tensors]]:
        """Start a swap without waiting; the function returned waits and gives what was received."""
        what = self._next("swap")
        sent = {k: v.detach().to(self._device or v.device).contiguous() for k, v in values.items()}
        got = [
            {k: torch.empty_like(v) if p != self.rank else v.clone() for k, v in sent.items()}
            for p in peers
        ]
        remote = [(p, into) for p, into in zip(peers, got, strict=True) if p != self.rank]
        # messages of a pair of ranks keep their order, so they match although all have one tag
        receives = [
            (p, _bytes(into[k])) for p, into in remote for k, v in sent.items() if v.numel()
        ]
        sends = [(p, _bytes(v)) for p, _ in remote for v in sent.values() if v.numel()]
        try:
            works = self._post(receives, sends, SWAP)
        except RuntimeError as e:
            raise self._lost(what, e) from e

        def finish() -> list[Tensors]:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as e:
                raise self._lost(what, e) from e
            sends.clear()  # until here: the backend reads from these
            return [{k: v.to(values[k].device) for k, v in into.items()} for into in got]

        return finish

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        to_oneself(self, give, into)
        what = self._next("transfer")
        sent = {
            r: v.detach().to(self._device or v.device)
            for r, v in give.items()
            if r != self.rank and v.numel()
        }
        got = {r: v.detach() for r, v in into.items() if r != self.rank and v.numel()}
        pending = [
            (
                v,
                torch.empty_like(v, device=self._device)
                if self._device not in (None, v.device)
                else v,
            )
            for v in got.values()
        ]
        receives = [(r, _bytes(landing)) for r, (_, landing) in zip(got, pending, strict=True)]
        try:
            works = self._post(receives, [(r, _bytes(v)) for r, v in sent.items()], TRANSFER)
        except RuntimeError as e:
            raise self._lost(what, e) from e
        return _Exchange(self, what, works, pending, keep=sent)

    def close(self) -> None:
        # gloo ends its threads and sockets when the last reference goes, not on shutdown
        close, self._close, self._open = self._close, None, None
        if close is not None:
            close()

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._open is None:
            raise PeerLost(f"rank {self.rank} of {self.size}: this group is closed; connect again")
        return self._open

    def _post(
        self, receives: list[tuple[int, Tensor]], sends: list[tuple[int, Tensor]], tag: int
    ) -> list[dist.Work]:
        if not receives and not sends:
            return []
        group, device = self._group, (receives or sends)[0][1].device
        together = group._get_backend(device).supports_coalescing
        if together:
            # nccl: one kernel for all, or two ranks that send to each other first would hang
            group._start_coalescing(device)
        works = [group.recv([into], p, tag) for p, into in receives] + [
            group.send([v], p, tag) for p, v in sends
        ]
        return [group._end_coalescing(device)] if together else works

    def _next(self, what: str) -> str:
        self._calls += 1
        return f"{what} #{self._calls - 1}"

    def _lost(self, what: str, e: RuntimeError) -> PeerLost:
        return PeerLost(
            f"rank {self.rank} of {self.size}: a peer died or did not come to {what} in time "
            f"({str(e).splitlines()[0]}); close this group, start again from the last snapshot, "
            "and look into the other ranks' output for the cause"
        )


class _Exchange:
    """Works of the backend, and what remains to do after them: divide, and copy `pending` pairs
    (caller's tensor, tensor of the backend). `keep`: other tensors that the backend reads from."""

    def __init__(
        self,
        group: CollectiveGroup,
        what: str,
        works: list[dist.Work],
        pending: Sequence[tuple[Tensor, Tensor]] = (),
        divisor: int = 1,
        keep: object = None,
    ):
        self._group, self._what, self._works = group, what, works
        self._pending, self._divisor, self._keep = pending, divisor, keep

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as e:
            raise self._group._lost(self._what, e) from e
        for value, sent in self._pending:
            if self._divisor > 1:
                sent.div_(self._divisor) if sent.is_floating_point() else sent.floor_divide_(
                    self._divisor
                )
            if sent.data_ptr() != value.data_ptr():
                value.copy_(sent)
        self._works, self._pending, self._keep = [], (), None  # a second wait divides nothing


def connect(
    rank: int,
    size: int,
    store: dist.Store,
    backend: str = "gloo",
    timeout_s: float = 600.0,
    device: torch.device | None = None,
    interruption: Interruption | None = None,
) -> CollectiveGroup:
    """Connect all ranks over `store`, in which the keys of this group are free. `device`: for
    nccl."""
    if backend == "mpi":
        return _connect_mpi(rank, size)
    before = set() if interruption is None else open_sockets()
    if interruption is not None and backend == "gloo":
        store = InterruptibleStore(store, timeout_s, interruption)
    group = dist.ProcessGroup(store, rank, size)
    timeout = timedelta(seconds=timeout_s)
    kinds = dist.ProcessGroup.BackendType
    try:
        if backend == "gloo":
            device = torch.device("cpu")
            group._set_default_backend(kinds.GLOO)
            group._register_backend(
                device, kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout)
            )
        elif backend == "nccl":
            if device is None or device.index is None or not dist.is_nccl_available():
                raise PlanError(
                    f"backend nccl on device {device}, nccl in this torch: "
                    f"{dist.is_nccl_available()}; needed: a device with its number, such as "
                    "cuda:0, and a torch built for CUDA; or set link=gloo"
                )
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(store, rank, size, options)
            # else a swap between some ranks would wait for all
            nccl.eager_connect_single_device(device)
            group._set_default_backend(kinds.NCCL)
            group._register_backend(device, kinds.NCCL, nccl)
        else:
            raise PlanError(f"backend {backend!r}; needed: gloo, nccl or mpi")
    except RuntimeError as e:
        raise PeerLost(
            f"rank {rank}: not all of {size} ranks came to connect over {backend} in "
            f"{timeout_s:g} s ({str(e).splitlines()[0]}); look at what the missing ones print, "
            "check that they reach this host, or raise timeout_s"
        ) from e
    if interruption is not None:
        interruption.add(functools.partial(shut_down, open_sockets() - before))
    return CollectiveGroup(group, device, close=functools.partial(_shut_down_group, group, store))


def _shut_down_group(group: dist.ProcessGroup, store: dist.Store) -> None:
    """`store`: one that is written in Python must live as long as the group does."""
    group.shutdown()


def _connect_mpi(rank: int, size: int) -> CollectiveGroup:
    if not dist.is_mpi_available():
        raise PlanError(
            "backend mpi, but this torch was built without it; "
            "build torch against your MPI, or set link=gloo"
        )
    dist.init_process_group("mpi")  # mpi finds its ranks itself; one world per process
    group = dist.group.WORLD
    assert group is not None
    if (group.rank(), group.size()) != (rank, size):
        raise PlanError(
            f"mpirun says rank {group.rank()} of {group.size()}, the launcher says rank {rank} "
            f"of {size}; start all ranks with one mpirun"
        )
    return CollectiveGroup(group, torch.device("cpu"), close=dist.destroy_process_group)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
