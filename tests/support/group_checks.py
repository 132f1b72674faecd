"""Checks of a group: one list for every kind, bare, observed, and for every algorithm."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.core import (
    Group,
    Op,
    Tensors,
)
from manyhands.exchange import collective, hierarchical, segments
from manyhands.exchange.mailbox import CHUNK_BYTES, SLOTS
from manyhands.exchange.shared import STAGING_BYTES, SharedGroup

TIMEOUT_S = 30.0
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
NUMELS = (0, 1, 1023, 20_011)  # nothing, one, odd and owned by one rank, odd and cut into parts
LARGE = STAGING_BYTES // 4 + 1003  # float32: one staging buffer and a bit
LONG = SLOTS * CHUNK_BYTES // 4 + 40_003  # float32: one mailbox and a bit
OPS: tuple[Op, ...] = ("sum", "mean", "max")


# -- the table of links --


@dataclass(frozen=True)
class Case:
    kind: str
    hosts: str  # the host of every rank, one letter each

    @property
    def size(self) -> int:
        return len(self.hosts)

    def connect(self, rank: int, store: dist.Store) -> Group:
        if self.kind == "shared":
            return SharedGroup(rank, self.size, store, timeout_s=TIMEOUT_S)
        if self.kind == "gloo":
            return collective.connect(rank, self.size, store, "gloo", TIMEOUT_S)
        return hierarchical.connect(rank, self.size, list(self.hosts), store, TIMEOUT_S)

    def __str__(self) -> str:
        return f"{self.kind}-{self.hosts if self.kind == 'hierarchical' else self.size}"


# -- what groups are checked for: each returns tensors that must have the same bits on all ranks --

Check = Callable[[Group], list[Tensor]]
CHECKS: dict[str, Check] = {}


def check(f: Check) -> Check:
    CHECKS[f.__name__] = f
    return f


@functools.cache
def _given(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    dice = torch.Generator().manual_seed(7919 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=dice).to(dtype)
    if dtype == torch.bool:
        return torch.rand(numel, generator=dice) < 0.5
    return torch.randint(-1000, 1000, (numel,), generator=dice, dtype=dtype)


def given(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What `rank` brings: every rank knows what all bring, and so the answer."""
    return _given(rank, numel, dtype).clone()


def assert_reduced(got: Tensor, size: int, op: Op) -> None:
    dtype, numel = got.dtype, got.numel()
    needed = _given(0, numel, dtype).to(torch.float64 if dtype.is_floating_point else dtype)
    for rank in range(1, size):
        needed = (
            torch.maximum(needed, _given(rank, numel, dtype))
            if op == "max"
            else needed + _given(rank, numel, dtype)
        )
    if op == "mean":
        needed = needed / size if dtype.is_floating_point else needed // size
    # each addition may round once, at the size that the sum has by then
    slack = 8 * size * torch.finfo(dtype).eps if dtype.is_floating_point and op != "max" else 0.0
    assert ((got.reshape(-1) - needed).abs() <= slack * (1 + needed.abs())).all(), (
        f"{op} of {numel} {dtype}: {got} is not {needed}"
    )


def place(group: Group, numel: int, dtype: torch.dtype) -> Tensor:
    """Memory that the link reduces in place, where it has such memory."""
    return group.allocate(numel, dtype)


def reduces(op: Op, dtypes: tuple[torch.dtype, ...], numels: tuple[int, ...]) -> Check:
    def reduced(group: Group) -> list[Tensor]:
        got = []
        for dtype, numel in itertools.product(dtypes, numels):
            mine = given(group.rank, numel, dtype)
            for into in (mine.clone(), place(group, numel, dtype).copy_(mine)):
                group.all_reduce({"x": into}, op).wait()
                got.append(into)
        for x in got:
            assert_reduced(x, group.size, op)
        return got

    return reduced


for _op in OPS:
    CHECKS[f"all_reduce_{_op}"] = reduces(_op, DTYPES, NUMELS)
CHECKS["all_reduce_mean_of_more_than_the_staging_buffer"] = reduces(
    "mean", (torch.float32,), (LARGE,)
)
CHECKS["all_reduce_sum_of_more_than_the_staging_buffer"] = reduces("sum", (torch.int64,), (LARGE,))


@check
def all_reduce_takes_many_names_dtypes_and_shapes_at_once(group: Group) -> list[Tensor]:
    mine: Tensors = {
        "matrix": given(group.rank, 1023, torch.float32).view(31, 33),
        "nothing": torch.empty(0, 5),
        "scalar": given(group.rank, 1, torch.float64).view(()),
        "columns": given(group.rank, 420, torch.float32)
        .view(20, 21)
        .t()
        .contiguous()
        .t(),  # not contiguous
        "every_second": torch.zeros(30, dtype=torch.int64)[::2].copy_(
            given(group.rank, 15, torch.int64)
        ),
        "placed": place(group, 5000, torch.float32).copy_(given(group.rank, 5000, torch.float32)),
        "leaf": torch.nn.Parameter(given(group.rank, 77, torch.float32)),
    }
    group.all_reduce(mine, "sum").wait()
    for k, v in mine.items():
        if k != "nothing":
            assert_reduced(v.detach().contiguous(), group.size, "sum")
    return list(mine.values())


@check
def all_reduce_leaves_the_neighbouring_memory_alone(group: Group) -> list[Tensor]:
    whole = place(group, 3 * 9001, torch.float32).fill_(group.rank + 1.0)
    whole[9001 : 2 * 9001].copy_(given(group.rank, 9001, torch.float32))
    group.all_reduce({"middle": whole[9001 : 2 * 9001]}, "mean").wait()
    assert_reduced(whole[9001 : 2 * 9001], group.size, "mean")
    assert (whole[:9001] == group.rank + 1).all() and (whole[2 * 9001 :] == group.rank + 1).all()
    return [whole[9001 : 2 * 9001]]


@check
def several_calls_may_be_under_way_and_be_waited_for_in_any_order_and_twice(
    group: Group,
) -> list[Tensor]:
    numels = (5, 6000, 1, 70_001, 300)
    for make in (lambda n, t: torch.zeros(n, dtype=t), functools.partial(place, group)):
        mine = [make(n, torch.float32).copy_(given(group.rank, n, torch.float32)) for n in numels]
        works = [group.all_reduce({"x": x}, OPS[i % 3]) for i, x in enumerate(mine)]
        for work in (works[3], *works, works[1]):
            work.wait()
        for i, x in enumerate(mine):
            assert_reduced(x, group.size, OPS[i % 3])
    return mine


@check
def the_same_memory_can_be_reduced_again_and_again(group: Group) -> list[Tensor]:
    x = place(group, 4099, torch.float64)
    for turn in range(20):
        x.fill_(group.rank + turn)
        group.all_reduce({"x": x}).wait()
        assert (x == sum(range(group.size)) + group.size * turn).all()
    return [x]


@check
def broadcast_copies_from_every_source_whatever_the_memory(group: Group) -> list[Tensor]:
    got = []
    for source, numel in itertools.product(range(group.size), NUMELS):
        for dtype in (*DTYPES, torch.bool, torch.int16):
            mine = given(group.rank, numel, dtype)
            values = {
                "foreign": mine.clone(),
                "placed": place(group, numel, dtype).copy_(mine) if numel < 2000 else mine.clone(),
                "rows": mine.clone().view(1, numel).t().contiguous().t(),
            }
            work = group.broadcast(values, source)
            work.wait()
            work.wait()
            for k, v in values.items():
                assert torch.equal(v.reshape(-1), given(source, numel, dtype)), (k, source, dtype)
            got += values.values()
    return got


@check
def broadcast_of_more_than_the_staging_buffer(group: Group) -> list[Tensor]:
    source = group.size - 1
    values = {
        "foreign": given(group.rank, LARGE, torch.float32),
        "placed": place(group, LARGE, torch.float32).copy_(given(group.rank, LARGE, torch.float32)),
    }
    group.broadcast(values, source).wait()
    for v in values.values():
        assert_came(v, source)
    return list(values.values())


@check
def broadcast_takes_columns_scalars_and_leaves_and_touches_nothing_else(
    group: Group,
) -> list[Tensor]:
    whole = place(group, 3 * 9001, torch.float32).fill_(group.rank + 1.0)
    whole[9001 : 2 * 9001].copy_(given(group.rank, 9001, torch.float32))
    values = {
        "middle": whole[9001 : 2 * 9001],
        "scalar": given(group.rank, 1, torch.float64).view(()),
        "every_second": torch.zeros(30, dtype=torch.int64)[::2].copy_(
            given(group.rank, 15, torch.int64)
        ),
        "leaf": torch.nn.Parameter(given(group.rank, 77, torch.float32)),
        "nothing": torch.empty(0, 5),
    }
    group.broadcast(values).wait()
    for k, v in values.items():
        assert_came(v, 0) if k != "nothing" else None
    assert (whole[:9001] == group.rank + 1).all() and (whole[2 * 9001 :] == group.rank + 1).all()
    return list(values.values())


@check
def broadcasts_keep_signs_of_zeros_and_nans(group: Group) -> list[Tensor]:
    odd = torch.tensor([-0.0, float("nan"), float("-inf")])
    x = odd.clone() if group.rank == 0 else torch.zeros(3)
    group.broadcast({"x": x}).wait()
    assert torch.equal(x.view(torch.int32), odd.view(torch.int32))
    return [x]


@check
def broadcasts_and_all_reduces_may_be_under_way_together(group: Group) -> list[Tensor]:
    x, y = (
        place(group, 9001, torch.float32).copy_(given(group.rank, 9001, torch.float32))
        for _ in range(2)
    )
    z = torch.zeros(7) + group.rank
    works = [group.all_reduce({"x": x}), group.broadcast({"y": y}), group.broadcast({"z": z})]
    for i in (range(3), reversed(range(3)))[group.rank % 2]:
        works[i].wait()
    assert_reduced(x, group.size, "sum")
    assert_came(y, 0)
    assert (z == 0).all()
    return [x, y, z]


@check
def a_broadcast_from_nobody_is_refused(group: Group) -> list[Tensor]:
    for source in (-1, group.size):
        with pytest.raises(ValueError, match=rf"broadcast from rank {source}, but ranks are 0 to"):
            group.broadcast({"x": torch.ones(1)}, source)
    return []


@check
def nobody_leaves_a_barrier_before_all_have_come(group: Group) -> list[Tensor]:
    path = segments.directory() / f"test-barrier-{_token(group)}"
    for turn in range(5):
        if turn % group.size == group.rank:  # the late one
            time.sleep(0.01)
        if group.rank == 0:
            path.touch()
        group.barrier()
        assert path.exists()
        group.barrier()
        if group.rank == group.size - 1:
            path.unlink()
        group.barrier()
        assert not path.exists()
        group.barrier()
    return []


def _token(group: Group) -> int:
    token = torch.tensor([os.getpid() * 1000 + id(group) % 1000 if group.rank == 0 else 0])
    group.broadcast({"token": token}).wait()
    return int(token)


@check
def a_barrier_may_be_called_while_other_calls_are_under_way(group: Group) -> list[Tensor]:
    left, right = around(group)
    x = place(group, 9001, torch.float32).copy_(given(group.rank, 9001, torch.float32))
    into = torch.empty(LONG)
    for turn in range(4):
        x.copy_(given(group.rank, 9001, torch.float32))
        transfer = group.transfer({right: given(group.rank, LONG, torch.float32)}, {left: into})
        reduction = group.all_reduce({"x": x})
        if (group.rank + turn) % 2:  # some wait before the barrier, some behind it
            reduction.wait()
        group.barrier()
        reduction.wait()
        transfer.wait()
        assert_came(into, left)
        assert_reduced(x, group.size, "sum")
    return [x]


@check
def reduce_scatter_and_all_gather_make_an_all_reduce(group: Group) -> list[Tensor]:
    got = []
    for dtype, op in itertools.product(DTYPES, OPS):
        whole = place(group, 100_003, dtype).copy_(mine := given(group.rank, 100_003, dtype))
        group.reduce_scatter({"x": whole}, op).wait()
        owned = group.own(whole)
        kept = torch.ones(100_003, dtype=torch.bool)
        for part in owned:
            kept[part] = False
        assert torch.equal(whole[kept], mine[kept]), "what others own keeps what it had"
        group.all_gather({"x": whole}).wait()
        assert_reduced(whole, group.size, op)
        owners = torch.zeros(100_003, dtype=torch.int64)
        for part in owned:
            owners[part] += 1
        group.all_reduce({"owners": owners}).wait()
        assert (owners == 1).all(), "every element has one owner"
        got.append(whole)
    return got


def assert_swapped(group: Group, mine: Tensors, peers: list[int], got: list[Tensors]) -> None:
    assert len(got) == len(peers)
    for peer, theirs in zip(peers, got, strict=True):
        assert list(theirs) == list(mine)
        for k, v in theirs.items():
            assert v.shape == mine[k].shape and v.dtype == mine[k].dtype
            assert torch.equal(v.reshape(-1), given(peer, v.numel(), v.dtype)), (
                f"{k} of rank {peer}"
            )


def to_swap(group: Group) -> Tensors:
    return {
        "a": given(group.rank, 1023, torch.float32).view(31, 33),
        "nothing": torch.empty(0, dtype=torch.float64),
        "b": given(group.rank, 7, torch.bfloat16),
        "c": given(group.rank, 20_011, torch.int64),
        "columns": given(group.rank, 1, torch.float32).expand(1, 1).t(),
    }


@check
def swap_round_a_ring(group: Group) -> list[Tensor]:
    peers = [
        (group.rank - 1) % group.size,
        (group.rank + 1) % group.size,
    ]  # twice the same of two ranks, oneself when alone
    for _ in range(3):
        assert_swapped(group, mine := to_swap(group), peers, group.swap(mine, peers))
    return []


@check
def swap_with_all_and_with_nobody(group: Group) -> list[Tensor]:
    peers = [r for r in reversed(range(group.size)) if r != group.rank]
    assert_swapped(group, mine := to_swap(group), peers, group.swap(mine, peers))
    assert group.swap(to_swap(group), []) == []
    return []


@check
def swap_in_pairs_while_one_rank_sits_out(group: Group) -> list[Tensor]:
    for first in (0, 1, 0):
        peer = group.rank + 1 if (group.rank - first) % 2 == 0 else group.rank - 1
        peers = [peer] if 0 <= peer < group.size else []
        assert_swapped(group, mine := to_swap(group), peers, group.swap(mine, peers))
    return []


@check
def swap_of_more_than_the_staging_buffer(group: Group) -> list[Tensor]:
    peers = [(group.rank - 1) % group.size, (group.rank + 1) % group.size]
    mine = {"x": given(group.rank, LARGE, torch.float32)}
    assert_swapped(group, mine, peers, group.swap(mine, peers))
    return []


@check
def what_was_swapped_belongs_to_the_receiver(group: Group) -> list[Tensor]:
    peers = [r for r in range(group.size) if r != group.rank]
    mine = {"x": given(group.rank, 33, torch.float32)}
    for theirs in group.swap(mine, peers):
        theirs["x"].fill_(-1.0)
    mine["x"].mul_(2.0)
    again = group.swap(mine, peers)
    for peer, theirs in zip(peers, again, strict=True):
        assert torch.equal(theirs["x"], given(peer, 33, torch.float32) * 2)
    return []


@check
def a_swap_may_overtake_an_all_reduce(group: Group) -> list[Tensor]:
    x = place(group, 9001, torch.float32).copy_(given(group.rank, 9001, torch.float32))
    work = group.all_reduce({"x": x}, "mean")
    peers = [r for r in range(group.size) if r != group.rank]
    assert_swapped(group, mine := to_swap(group), peers, group.swap(mine, peers))
    work.wait()
    assert_reduced(x, group.size, "mean")
    return [x]


def around(group: Group) -> tuple[int, int]:
    return (group.rank - 1) % group.size, (group.rank + 1) % group.size


def assert_came(got: Tensor, peer: int) -> None:
    assert torch.equal(got.detach().reshape(-1), given(peer, got.numel(), got.dtype)), (
        f"{got.numel()} {got.dtype} of rank {peer}"
    )


@check
def transfer_round_a_ring_of_all_lengths_and_dtypes(group: Group) -> list[Tensor]:
    left, right = around(group)
    for dtype, numel in itertools.product(DTYPES, NUMELS):
        into = torch.empty(numel, dtype=dtype)
        group.transfer({right: given(group.rank, numel, dtype)}, {left: into}).wait()
        assert_came(into, left)
    return []


@check
def transfer_keeps_shapes_and_takes_parts_of_larger_tensors(group: Group) -> list[Tensor]:
    left, right = around(group)
    mine, into = torch.zeros(50, 33), place(group, 50 * 33, torch.float32).view(50, 33)
    mine[10:41] = given(group.rank, 1023, torch.float32).view(31, 33)
    group.transfer({right: mine[10:41]}, {left: into[10:41]}).wait()
    assert_came(into[10:41], left)
    assert (into[:10] == 0).all() and (into[41:] == 0).all(), "the rest of it is left alone"
    weight = torch.nn.Parameter(torch.zeros(7))
    group.transfer(
        {right: torch.nn.Parameter(given(group.rank, 7, torch.float32))}, {left: weight}
    ).wait()
    assert_came(weight, left)
    return []


@check
def transfer_of_more_than_a_mailbox_both_ways_at_once(group: Group) -> list[Tensor]:
    """More than any buffer between the ranks holds: somebody must receive while it sends."""
    left, right = around(group)
    mine = given(group.rank, LONG, torch.float32)
    for give, take in ((right, left), (left, right)):
        into = torch.empty(LONG)
        group.transfer({give: mine}, {take: into}).wait()
        assert_came(into, take)
    peers = [r for r in range(group.size) if r != group.rank][:3] if group.size <= 4 else []
    got = {r: torch.empty(LONG) for r in peers}
    group.transfer(dict.fromkeys(peers, mine), got).wait()
    for r, x in got.items():
        assert_came(x, r)
    return []


@check
def a_ring_in_which_everybody_sends_first_goes_round(group: Group) -> list[Tensor]:
    left, right = around(group)
    if left == group.rank:
        return []  # who writes to itself names both ends in one call
    for numel in (1, LONG):
        into = torch.empty(numel)
        sent = group.transfer({right: given(group.rank, numel, torch.float32)}, {})
        got = group.transfer({}, {left: into})
        sent.wait()
        got.wait()
        assert_came(into, left)
    return []


@check
def messages_between_two_ranks_arrive_in_order_however_they_are_waited_for(
    group: Group,
) -> list[Tensor]:
    left, right = around(group)
    if left == group.rank:
        return []
    numels = (1, 300, 70_001, 0, 5)
    into = [torch.empty(n) for n in numels]
    sent = [group.transfer({right: given(group.rank, n, torch.float32)}, {}) for n in numels]
    got = [group.transfer({}, {left: x}) for x in into]
    for work in (got[3], got[1], *sent, *got, sent[0]):
        work.wait()
    for x in into:
        assert_came(x, left)
    return []


@check
def a_transfer_concerns_only_the_ranks_it_names(group: Group) -> list[Tensor]:
    """Rank 0 writes to the last rank and hears from it; the others make no call at all."""
    last, x = group.size - 1, torch.zeros(3)
    if group.rank == 0 and last:
        group.transfer({last: given(0, 3, torch.float32)}, {last: x}).wait()
        assert_came(x, last)
    elif group.rank == last and last:
        group.transfer({}, {0: x}).wait()
        assert_came(x, 0)
        group.transfer({0: given(last, 3, torch.float32)}, {}).wait()
    group.transfer({}, {}).wait()
    return []


@check
def transfers_swaps_and_all_reduces_may_be_under_way_together(group: Group) -> list[Tensor]:
    left, right = around(group)
    x, into = (
        place(group, 9001, torch.float32).copy_(given(group.rank, 9001, torch.float32)),
        torch.empty(LONG),
    )
    transfer = group.transfer({right: given(group.rank, LONG, torch.float32)}, {left: into})
    reduction = group.all_reduce({"x": x}, "mean")
    assert_swapped(group, mine := to_swap(group), [left, right], group.swap(mine, [left, right]))
    reduction.wait()
    transfer.wait()
    assert_came(into, left)
    assert_reduced(x, group.size, "mean")
    return [x]


@check
def what_was_transferred_belongs_to_the_receiver(group: Group) -> list[Tensor]:
    left, right = around(group)
    mine, into = given(group.rank, 33, torch.float32), torch.empty(33)
    group.transfer({right: mine}, {left: into}).wait()
    mine.fill_(-1.0)
    assert_came(into, left)
    return []


@check
def transfers_to_nobody_and_of_stripes_are_refused(group: Group) -> list[Tensor]:
    for give in (
        {group.size: torch.ones(1)},
        {-1: torch.ones(1)},
        {group.rank: torch.ones(4)[::2]},
        {group.rank: torch.ones(1)},
    ):
        with pytest.raises(ValueError, match=rf"rank {group.rank} transfers"):
            group.transfer(give, {})
    return []
