"""Hierarchical group: shared memory inside each host, gloo between hosts.

    inside     rank j of a host sums part j over the host's memory
    between    the ranks j of all hosts all-reduce their parts
    inside     rank j writes the result into the memory of all ranks of its host

j < k, the number of ranks of the smallest host: k all-reduces between hosts run at once.
Each byte crosses the network once per host, not once per rank, and each column does the same
arithmetic once, so all ranks of all hosts hold the same bits. Ranks of the group are global; which
host a rank is on changes only the speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core import (
    Finished,
    Group,
    Op,
    Tensors,
    Work,
)
from manyhands.errors import PeerLost, PlanError
from manyhands.exchange import collective, reduce_scatter
from manyhands.exchange.interruption import Interruption
from manyhands.exchange.shared import SharedGroup
from manyhands.exchange.solo import check_source


class HierarchicalGroup(Group):
    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        store: dist.Store,
        timeout_s: float = 600.0,
        interruption: Interruption | None = None,
    ):
        self.rank, self.size = rank, len(hosts)
        names = list(dict.fromkeys(hosts))
        # global ranks of this host, by local rank
        self._neighbours = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        self._hosts = names
        self._members = [[r for r, host in enumerate(hosts) if host == name] for name in names]
        # Every rank with every other, for swaps and transfers. Connected now, not when first
        # needed: a transfer is between two ranks, and the others would not come to connect.
        self._anyone = collective.connect(
            rank,
            self.size,
            dist.PrefixStore("anyone", store),
            "gloo",
            timeout_s,
            interruption=interruption,
        )
        self._column: collective.CollectiveGroup | None = None
        self._latest: Work = Finished()
        host, local = names.index(hosts[rank]), self._neighbours.index(rank)
        owners = min(list(hosts).count(name) for name in names)
        try:
            if local < owners and len(names) > 1:
                column = dist.PrefixStore(f"column/{local}", store)
                self._column = collective.connect(
                    host, len(names), column, "gloo", timeout_s, interruption=interruption
                )
            self._inside = SharedGroup(
                local,
                len(self._neighbours),
                dist.PrefixStore(f"host/{host}", store),
                timeout_s=timeout_s,
                between=self._across if len(names) > 1 else None,
                owners=owners,
                divisor=self.size,
                interruption=interruption,
            )
        except PeerLost as e:
            for group in (self._column, self._anyone):
                if group is not None:
                    group.close()
            raise self._globally(e) from e

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        return self._inside.allocate(numel, dtype, device)

    def all_reduce(self, values: Tensors, op: Op = "sum") -> Work:
        try:
            work = self._inside.all_reduce(values, op)
        except PeerLost as e:
            raise self._globally(e) from e
        if not isinstance(work, Finished):
            self._latest = work
        return _Reduction(self, work)

    def own(self, tensor: Tensor) -> list[slice]:
        return [reduce_scatter.equal_part(tensor.numel(), self.rank, self.size)]

    def reduce_scatter(self, values: Tensors, op: Op = "sum") -> Work:
        return reduce_scatter.reduce_scatter(self, values, op)

    def all_gather(self, values: Tensors) -> Work:
        return reduce_scatter.all_gather(self, values)

    def broadcast(self, values: Tensors, source: int = 0) -> Work:
        """Over the network once a host, to its first rank; from there on in the host's memory."""
        check_source(self, source)
        heads = [source if source in ranks else ranks[0] for ranks in self._members]
        mine = next(head for head in heads if head in self._neighbours)
        remote = [head for head in heads if head != source] if self.rank == source else []
        sends: list[Work] = []
        self._settle()
        try:
            for value in values.values():
                flat = value.detach().contiguous()
                if self.rank == source:
                    sends.append(self._anyone.transfer(dict.fromkeys(remote, flat), {}))
                elif self.rank == mine:
                    self._anyone.transfer({}, {source: flat}).wait()
                    if flat.data_ptr() != value.data_ptr():
                        value.detach().copy_(flat)
        except PeerLost as e:
            raise PeerLost(f"broadcast from rank {source}: {e}", e.ranks) from e
        try:
            work = self._inside.broadcast(values, self._neighbours.index(mine))
        except PeerLost as e:
            raise self._globally(e) from e
        if not isinstance(work, Finished):
            self._latest = work
        return _Reduction(self, work, sends)

    def barrier(self) -> None:
        self._settle()
        self._anyone.barrier()

    def swap(self, values: Tensors, peers: Sequence[int]) -> list[Tensors]:
        near = [p for p in peers if p in self._neighbours]
        far = [p for p in peers if p not in self._neighbours]
        self._settle()
        try:
            # no rank waits for a neighbour before its messages to other hosts are under way,
            # so no other circle can close
            finish = self._anyone.begin_swap(values, far)
            got_near = iter(self._inside.swap(values, [self._neighbours.index(p) for p in near]))
        except PeerLost as e:
            raise self._globally(e) from e
        got_far = iter(finish())
        return [next(got_near if p in self._neighbours else got_far) for p in peers]

    def transfer(
        self, give: Mapping[int, Tensor], into: Mapping[int, Tensor], name: str = ""
    ) -> Work:
        # To neighbours too: gloo moves bytes while this rank waits elsewhere, shared memory does
        # not. A rank that waits for another host would keep back the rest of a message to its
        # neighbour, for which that host may wait.
        return self._anyone.transfer(give, into, name)

    def close(self) -> None:
        for group in (self._inside, self._column, self._anyone):
            if group is not None:
                group.close()

    def _settle(self) -> None:
        """Finish all earlier all-reduces before this rank blocks on something else.

        An owner blocks while its part crosses hosts. If it did so behind a swap, its neighbours'
        swaps would wait for it, and the owners of other hosts, which it waits for, for their
        neighbours: a circle. A rank that waits for another host's message would close the same
        circle, as it reduces nothing for its neighbours meanwhile.
        """
        try:
            self._latest.wait()
        except PeerLost as e:
            raise self._globally(e) from e

    def _across(self, part: Tensor, op: Op) -> None:
        assert self._column is not None, "only owners reduce parts"
        # the caller divides, once, by the number of all ranks
        self._column.all_reduce({"part": part}, "max" if op == "max" else "sum").wait()

    def _globally(self, e: PeerLost) -> PeerLost:
        """The same loss in global ranks: shared memory counts a host's ranks, a column hosts."""
        if not e.ranks:
            return PeerLost(
                f"rank {self.rank} of {self.size}, between hosts {', '.join(self._hosts)} "
                f"(its ranks are hosts): {e}"
            )
        lost = tuple(self._neighbours[r] for r in e.ranks)
        return PeerLost(
            f"rank {self.rank} of {self.size} lost ranks {list(lost)} of its host "
            f"(there, counted from 0: {e})",
            lost,
        )


class _Reduction:
    """`work` counts ranks within the host; `sends` to other hosts count them globally."""

    def __init__(self, group: HierarchicalGroup, work: Work, sends: Sequence[Work] = ()):
        self._group, self._work, self._sends = group, work, sends

    def wait(self) -> None:
        try:
            self._work.wait()
        except PeerLost as e:
            raise self._group._globally(e) from e
        for send in self._sends:
            send.wait()
        self._sends = ()


def connect(
    rank: int,
    size: int,
    hosts: Sequence[str],
    store: dist.Store,
    timeout_s: float = 600.0,
    interruption: Interruption | None = None,
) -> HierarchicalGroup:
    """`hosts` names the host of every rank; ranks of one host need not be consecutive."""
    if len(hosts) != size:
        raise PlanError(f"{len(hosts)} host names for {size} ranks; give the host of every rank")
    return HierarchicalGroup(rank, hosts, store, timeout_s, interruption)
